"""The memory a model needs while it runs, from its config and file headers, and what there is."""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from .cache import Policy
from .cache.policy import describe
from .cache.quantized_rows import WORKSPACE
from .errors import UserError
from .format import size
from .models.hybrid_config import KDA, MLA, MOE, HybridConfig
from .step import prefill_step

POLICIES = ("exact", "int8", "int4", "window:4096+16", "window:4096+16,int8")
FLOATS = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


@dataclass(frozen=True)
class Need:
    """Bytes that a sequence of ``context`` tokens needs under a policy.

    ``working`` is the largest amount that prefilling adds to the rest. It is predicted from the
    layers' shapes; the other numbers follow from the files and the config.
    """

    policy: str
    context: int
    weights: int
    states: int
    latents: int
    working: int

    @property
    def total(self) -> int:
        return self.weights + self.states + self.latents + self.working


@dataclass(frozen=True)
class MachineMemory:
    """Bytes of this machine's memory, how many a model may use, and where that limit comes from."""

    total: int
    usable: int
    source: str


def need(
    config: HybridConfig,
    weights: int,
    dtype: mx.Dtype,
    context: int,
    policy: str | Policy = "exact",
    step: int | None = None,
) -> Need:
    """What a model needs whose weights take ``weights`` bytes and compute in ``dtype``.

    Prompts are read ``step`` tokens at a time, by default as many as this machine's default.
    """
    policy = Policy.parse(policy)
    step = min(prefill_step() if step is None else step, max(context, 1))
    layers = describe(config, policy, dtype)
    return Need(
        policy=str(policy),
        context=context,
        weights=weights,
        states=sum(layer.bytes_at(context) for layer in layers if layer.kind == KDA),
        latents=sum(layer.bytes_at(context) for layer in layers if layer.kind == MLA),
        working=_working_set(config, dtype.size, context, policy, step),
    )


def _working_set(config: HybridConfig, itemsize: int, context: int, policy: Policy, T: int) -> int:
    """Predicted bytes of activations while the widest layer reads ``T`` tokens of the prompt.

    ``itemsize`` is the bytes of one activation.
    """
    keys, values = config.linear_key_width, config.linear_value_width
    gates = config.linear_num_v_heads * config.linear_head_dim
    heads = config.num_attention_heads
    # KDA: five projections (q, k, v, both gates) and three convolved, then float32 in the op.
    kda = T * (4 * keys + 3 * values + gates) * itemsize
    kda += T * (4 * keys + 4 * values + 2 * gates) * 4
    # MLA: queries and outputs; blocks of keys, values and scores; one layer's latents, contiguous.
    rows = context if policy.slots is None else min(policy.slots, context) + T
    row = (config.kv_lora_rank + config.qk_rope_head_dim) * itemsize
    queries = T * heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    mla = 2 * queries * itemsize + 4 * WORKSPACE + (rows * row if policy.bits is None else 0)
    dense = 3 * T * config.intermediate_size * itemsize
    chosen = T * config.num_experts_per_token
    moe = chosen * (2 * config.hidden_size + 3 * config.moe_intermediate_size) * itemsize
    widest = max(
        kda if KDA in config.layer_types else 0,
        mla if MLA in config.layer_types else 0,
        moe if MOE in config.mlp_layer_types else dense,
    )
    return widest + 6 * T * config.hidden_size * itemsize + 3 * config.vocab_size * 4


def machine() -> MachineMemory:
    """This machine's memory: on a Mac what Metal recommends to use, else all there is."""
    if mx.metal.is_available():
        info = mx.device_info(mx.gpu)
        return MachineMemory(
            int(info["memory_size"]),
            int(info["max_recommended_working_set_size"]),
            "Metal's recommended working set",
        )
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _container_limit()
    if limit is not None and limit < total:
        return MachineMemory(limit, limit, "the container's limit")
    return MachineMemory(total, total, "physical memory")


def check(wanted: Need, memory: MachineMemory | None = None) -> None:
    """Raise UserError, with the numbers, where the machine's memory is too small."""
    memory = machine() if memory is None else memory
    if wanted.total <= memory.usable:
        return
    raise UserError(
        f"{wanted.context:,} tokens under {wanted.policy} need {size(wanted.total)}: weights "
        f"{size(wanted.weights)}, KDA states {size(wanted.states)}, latents "
        f"{size(wanted.latents)}, working set {size(wanted.working)} (predicted); this machine "
        f"has {size(memory.usable)} ({memory.source}): a shorter context, --policy int8 or "
        "window:4096+16, fewer bits, or --force to try"
    )


def activation_dtype(dtypes: Iterable[str]) -> str:
    """The dtype a model computes in, from its weights' dtypes, those with most bytes first.

    Integers are quantised weights; the others decide.
    """
    return next((name for name in dtypes if name in FLOATS), "float32")


def _container_limit() -> int | None:
    if sys.platform != "linux":
        return None
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() else None
    return None
