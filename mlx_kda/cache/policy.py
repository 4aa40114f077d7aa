"""What is kept of the latents of an MLA layer: the policies by name, and what each takes."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UserError

if TYPE_CHECKING:
    import mlx.core as mx

EXAMPLES = (
    "exact, window:N, window:N+S, int8, int4, or a window and bits, as in window:4096+16,int8"
)
SHARED_BITS = 8  # the shared keys are few and steer every head: never below 8 bits
GROUP_SIZES = (64, 32)
SPARE = 32  # rows of a ring beyond its window: so many tokens are taken back without a copy of it
_WINDOW = re.compile(r"window:([0-9]+)(?:\+([0-9]+))?")
_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Policy:
    """What an MLA layer keeps of a text.

    window, sinks: a query sees the first ``sinks`` tokens and the last ``window`` ones, itself
        among them, whatever the chunks that the text comes in; None: every token. A window is an
        approximation: what falls out of it is forgotten by the MLA layers (not by the KDA states).
    bits: 8 or 4, latents kept as affine integers of so many bits, an approximation too (the shared
        keys stay at 8); None: as the model computes them.
    """

    window: int | None = None
    sinks: int = 0
    bits: int | None = None

    @classmethod
    def parse(cls, text: "str | Policy") -> "Policy":
        """A policy by its name. Raises UserError for one that makes no sense."""
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
        """Rows of the fixed ring, None where latents grow with the text."""
        return None if self.window is None else self.sinks + self.window + SPARE

    def row_bytes(self, rank: int, shared: int, dtype: "mx.Dtype") -> int:
        """Bytes of one token in one layer: a latent of ``rank`` numbers and its shared key."""
        if self.bits is None:
            return (rank + shared) * dtype.size
        return _row(rank, self.bits, dtype) + _row(shared, SHARED_BITS, dtype)

    def bytes_at(self, tokens: int, rank: int, shared: int, dtype: "mx.Dtype") -> int:
        """Bytes of one layer after ``tokens``; a window's ring has its full size from the start."""
        rows = tokens if self.slots is None else self.slots
        return rows * self.row_bytes(rank, shared, dtype)


def group_size(width: int) -> int | None:
    """Numbers that share a scale in rows of ``width``; None where no group divides them."""
    return next((size for size in GROUP_SIZES if width and width % size == 0), None)


def _row(width: int, bits: int, dtype: "mx.Dtype") -> int:
    group = group_size(width)
    if group is None:
        return width * dtype.size
    return width * bits // 8 + width // group * 2 * dtype.size
