"""Cache policies: what an MLA layer keeps of a sequence, and the bytes of every layer's cache.

This module does not import MLX, so that the command line can check a policy before it does.
"""

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:
    import mlx.core as mx

EXAMPLES = (
    "exact, window:N, window:N+S, int8, int4, or a window and bits, as in window:4096+16,int8"
)
K_PE_BITS = 8  # k_pe is small and enters every head's scores: never below 8 bits
GROUP_SIZES = (64, 32)
SPARE = 32  # rows of a ring beyond its window: so many tokens can be undone without a copy of it
_WINDOW = re.compile(r"window:([0-9]+)(?:\+([0-9]+))?")
_BITS = {"int8": 8, "int4": 4}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RowFormat:
    """How cached rows [..., width] are stored.

    bits: None: one array, as the model computes it. 8 or 4: affine quantisation in groups of
        ``group_size``, three arrays (packed words, scales, biases).
    """

    bits: int | None = None
    group_size: int = 64

    def widths(self, width: int) -> list[int]:
        """Width of each array that rows of ``width`` become."""
        if self.bits is None:
            return [width]
        return [width * self.bits // 32, width // self.group_size, width // self.group_size]

    def row_bytes(self, width: int, dtype: "mx.Dtype") -> int:
        """Bytes of one row of ``width`` values."""
        if self.bits is None:
            return width * dtype.size
        return width * self.bits // 8 + width // self.group_size * 2 * dtype.size


AS_COMPUTED = RowFormat()


@dataclass(frozen=True)
class Policy:
    """What an MLA layer keeps of a sequence.

    window, sinks: a query sees the first ``sinks`` tokens and the last ``window`` ones, including
        itself, however the sequence is split into chunks; None: every token. A window is an
        approximation: MLA layers forget what falls out of it (KDA states do not).
    bits: 8 or 4: ``kv_latent`` is stored as affine integers of that many bits, also an
        approximation (``k_pe`` stays at 8); None: as the model computes it.
    """

    window: int | None = None
    sinks: int = 0
    bits: int | None = None

    @classmethod
    def parse(cls, text: "str | Policy") -> "Policy":
        """A policy by its name. Raises UserError where the name is not valid."""
        if isinstance(text, Policy):
            return text
        parts = [part.strip() for part in str(text).lower().split(",")]
        window, sinks, bits = None, 0, None
        for part in parts:
            match = _WINDOW.fullmatch(part)
            if match and window is None:
                window, sinks = int(match[1]), int(match[2] or 0)
                if window < 1:
                    raise UserError(f"cache policy {text!r}: a window holds at least 1 token")
            elif part in _BITS and bits is None:
                bits = _BITS[part]
            elif not (part == "exact" and len(parts) == 1):
                raise UserError(f"cache policy {text!r} is not one of: {EXAMPLES}")
        return cls(window, sinks, bits)

    def __str__(self) -> str:
        parts = []
        if self.window is not None:
            parts.append(f"window:{self.window}" + (f"+{self.sinks}" if self.sinks else ""))
        if self.bits is not None:
            parts.append(f"int{self.bits}")
        return ",".join(parts) or "exact"

    @property
    def exact(self) -> bool:
        """Whether nothing is left out or rounded."""
        return self.window is None and self.bits is None

    @property
    def slots(self) -> int | None:
        """Rows of the fixed ring, None where the cache grows with the sequence."""
        return None if self.window is None else self.sinks + self.window + SPARE

    def row_formats(self, rank: int, rope: int) -> tuple[RowFormat, RowFormat]:
        """How ``kv_latent`` rows of width ``rank`` and ``k_pe`` rows of width ``rope`` are stored.

        Raises UserError where ``rank`` cannot be quantised.
        """
        if self.bits is None:
            return AS_COMPUTED, AS_COMPUTED
        group, rope_group = _group_size(rank), _group_size(rope)
        if group is None:
            raise UserError(
                f"cache policy {self}: a kv_lora_rank of {rank} is not a multiple of 32, so the "
                "cache cannot be quantised; use exact or a window"
            )
        k_pe = AS_COMPUTED if rope_group is None else RowFormat(K_PE_BITS, rope_group)
        return RowFormat(self.bits, group), k_pe


def _group_size(width: int) -> int | None:
    """Values that share a scale in rows of ``width``; None where no group size divides it."""
    return next((size for size in GROUP_SIZES if width and width % size == 0), None)


def kda_shapes(config: Any) -> list[Shape]:
    """Shapes of one KDA layer's cache: the q, k and v convolution windows, and the state."""
    keys = config.linear_num_heads * config.linear_head_dim
    values = config.linear_num_v_heads * config.linear_v_head_dim
    rows = config.linear_conv_kernel_dim - 1
    state = (1, config.linear_num_v_heads, config.linear_v_head_dim, config.linear_head_dim)
    return [(1, rows, keys), (1, rows, keys), (1, rows, values), state]


def mla_shapes(config: Any, policy: Policy, tokens: int) -> list[Shape]:
    """Shapes of one MLA layer's cache after ``tokens`` tokens; a ring has its full size at once."""
    rows = tokens if policy.slots is None else policy.slots
    widths = (config.kv_lora_rank, config.qk_rope_head_dim)
    formats = policy.row_formats(*widths)
    return [(1, 1, rows, n) for f, w in zip(formats, widths, strict=True) for n in f.widths(w)]


@dataclass(frozen=True)
class LayerReport:
    """One layer's cache: the policy asked for, what is in force, and its size in bytes.

    ``now`` is what is allocated, spare room included; None where no cache was given.
    """

    index: int
    kind: str  # "kda" or "mla"
    asked: str
    in_force: str
    fixed_bytes: int
    token_bytes: int
    now: int | None = None

    def bytes_at(self, tokens: int) -> int:
        """Bytes after ``tokens`` tokens, without spare room."""
        return self.fixed_bytes + self.token_bytes * tokens


def describe(
    config: Any, policy: Policy | str, dtype: "mx.Dtype", cache: list[Any] | None = None
) -> list[LayerReport]:
    """The cache of every layer of a model with this config that computes in ``dtype``.

    Raises UserError for a policy that does not exist or that the config's shapes do not allow.
    """
    policy = Policy.parse(policy)
    reports = []
    for i, kind in enumerate(config.layer_types):
        now = None
        if cache is not None:
            now = 0 if cache[i].empty() else cache[i].nbytes
        text, fixed, token = _kda(config, dtype) if kind == "kda" else _mla(config, policy, dtype)
        reports.append(LayerReport(i, kind, str(policy), text, fixed, token, now))
    return reports


def _kda(config: Any, dtype: "mx.Dtype") -> tuple[str, int, int]:
    *windows, state = (math.prod(shape) for shape in kda_shapes(config))
    return (
        "state in float32 and convolution windows, fixed",
        4 * state + sum(windows) * dtype.size,
        0,
    )


def _mla(config: Any, policy: Policy, dtype: "mx.Dtype") -> tuple[str, int, int]:
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    name = str(dtype).removeprefix("mlx.core.")
    kv_latent, k_pe = policy.row_formats(rank, rope)
    row = kv_latent.row_bytes(rank, dtype) + k_pe.row_bytes(rope, dtype)
    text = f"latents {_stored(kv_latent.bits, name)}"
    if policy.bits is not None:
        text += f" in groups of {kv_latent.group_size}, shared keys {_stored(k_pe.bits, name)}"
    if policy.slots is None:
        return f"{text}, of every token", 0, row
    first = f"the first {policy.sinks:,} and " if policy.sinks else ""
    return f"{text}, of {first}the last {policy.window:,} tokens", row * policy.slots, 0


def _stored(bits: int | None, dtype: str) -> str:
    return f"in {dtype}" if bits is None else f"in {bits} bits"
