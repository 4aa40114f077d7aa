"""What a model carries from step to step: fixed-size KDA states and MLA latents."""

from typing import Any

from mlx_lm.models.cache import ArraysCache, KVCache

from .latents import LatentCache, packing
from .policy import Policy

__all__ = ["LatentCache", "Policy", "make_cache"]


def make_cache(model: Any, policy: str | Policy = "exact", *, portable: bool = True) -> list[Any]:
    """An empty cache for ``model``, one entry a layer.

    A KDA layer gets four arrays that never grow (the q, k and v windows, the state) in mlx-lm's
    ArraysCache. An MLA layer gets a LatentCache under ``policy``; under the exact policy and
    ``portable`` it gets mlx-lm's KVCache instead (keys are the latents [B, 1, S, kv_lora_rank],
    values the shared keys [B, 1, S, rope]), which mlx-lm's batching, saving and server know.

    Raises:
        UserError: a policy that does not exist, or that the model's shapes do not allow.
    """
    chosen = Policy.parse(policy)
    if not all(layer.is_linear for layer in model.layers):
        packing(chosen, model.args.kv_lora_rank, model.args.qk_rope_head_dim)
    plain = KVCache if chosen.exact and portable else lambda: LatentCache(chosen)
    return [ArraysCache(size=4) if layer.is_linear else plain() for layer in model.layers]
