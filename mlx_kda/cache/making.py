"""An empty cache for a model under a policy."""

import inspect
from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import ArraysCache, KVCache

from ..errors import UserError
from .latents import LatentCache, packing
from .policy import Policy


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


def cache_maker(model: Any, policy: Policy) -> Callable[[], list[Any]]:
    """What makes an empty cache of any model of mlx-lm's contract under the policy.

    Raises UserError where the model's class knows no policies and another than exact is wanted.
    """
    if "policy" in inspect.signature(type(model).make_cache).parameters:
        return lambda: model.make_cache(policy, portable=False)
    if not policy.exact:
        raise UserError(f"{type(model).__module__} knows no cache policy but exact, not {policy}")
    return model.make_cache
