"""What a cache was asked to be, what it is, and what it takes, layer by layer."""

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .latents import packing
from .policy import Policy


@dataclass(frozen=True)
class LayerReport:
    """One layer's cache: what was asked for, what is in force, bytes fixed, a token, and now.

    ``now`` is what is allocated, room for tokens to come included; None without a cache.
    """

    index: int
    kind: str  # "kda" or "mla"
    asked: str
    in_force: str
    fixed_bytes: int
    token_bytes: int
    now: int | None = None

    def bytes_at(self, tokens: int) -> int:
        """Bytes after ``tokens`` tokens, without room for more."""
        return self.fixed_bytes + self.token_bytes * tokens


def report(model: Any, policy: Policy | str, cache: list[Any] | None = None) -> list[LayerReport]:
    """Every layer of a model; see ``describe``."""
    return describe(model.args, policy, model.model.dtype, cache)


def describe(
    config: Any, policy: Policy | str, dtype: mx.Dtype, cache: list[Any] | None = None
) -> list[LayerReport]:
    """Every layer of a model with this config that computes in ``dtype``."""
    policy = Policy.parse(policy)
    found = []
    for i, kind in enumerate(config.layer_types):
        now = None
        if cache is not None:
            now = 0 if cache[i].empty() else cache[i].nbytes
        if kind == "kda":
            text, fixed, token = _kda(config, dtype)
        else:
            text, fixed, token = _mla(config, policy, dtype)
        found.append(LayerReport(i, kind, str(policy), text, fixed, token, now))
    return found


def _kda(config: Any, dtype: mx.Dtype) -> tuple[str, int, int]:
    state = math.prod(config.linear_state_shape) * mx.float32.size
    channels = 2 * config.linear_key_width + config.linear_value_width
    windows = channels * (config.linear_conv_kernel_dim - 1) * dtype.size
    return "state in float32 and convolution windows, fixed", state + windows, 0


def _mla(config: Any, policy: Policy, dtype: mx.Dtype) -> tuple[str, int, int]:
    rank, shared = config.kv_lora_rank, config.qk_rope_head_dim
    name = str(dtype).removeprefix("mlx.core.")
    latents, keys = packing(policy, rank, shared)
    row = policy.row_bytes(rank, shared, dtype)
    text = f"latents {_kept(latents.bits, name)}"
    if policy.bits is not None:
        text += f" in groups of {latents.group_size}, shared keys {_kept(keys.bits, name)}"
    if policy.window is None:
        return f"{text}, of every token", 0, row
    first = f"the first {policy.sinks:,} and " if policy.sinks else ""
    return f"{text}, of {first}the last {policy.window:,} tokens", row * policy.slots, 0


def _kept(bits: int | None, dtype: str) -> str:
    return f"in {dtype}" if bits is None else f"in {bits} bits"
