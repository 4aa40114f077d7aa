"""What a model carries from step to step: fixed-size KDA states and MLA latents."""

from typing import Any

from mlx_lm.models.cache import ArraysCache, KVCache

from ..errors import UserError

POLICIES = ("exact",)


def make_cache(model: Any, policy: str = "exact") -> list[Any]:
    """An empty cache for ``model``, one entry a layer.

    A KDA layer gets four arrays that never grow (the q, k and v windows, the state); an MLA layer
    a KVCache whose keys are the latents [B, 1, S, kv_lora_rank] and whose values are the shared
    keys [B, 1, S, rope]. Both are mlx-lm's own classes, so its batching and saving work.

    Raises:
        UserError: a policy that does not exist.
    """
    if policy not in POLICIES:
        raise UserError(f"cache policy {policy!r} is not one of: {', '.join(POLICIES)}")
    return [ArraysCache(size=4) if layer.is_linear else KVCache() for layer in model.layers]
