"""Cached rows, as computed or quantised, and what the queries of a step attend over."""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from .policy import AS_COMPUTED, RowFormat

Arrays = tuple[mx.array, ...]
# Bytes that one block of expanded keys and values, or of scores, may take. Longer contexts are
# computed in blocks of heads and of query rows.
WORKSPACE = 64 * 2**20


def quantize(rows: mx.array, form: RowFormat) -> Arrays:
    """Rows [..., width] as they are stored."""
    if form.bits is None:
        return (rows,)
    return tuple(mx.quantize(rows, group_size=form.group_size, bits=form.bits))


def dequantize(arrays: Arrays, form: RowFormat) -> mx.array:
    """Stored rows as values [..., width]."""
    if form.bits is None:
        return arrays[0]
    words, scales, biases = arrays
    return mx.dequantize(words, scales, biases, group_size=form.group_size, bits=form.bits)


def matmul(x: mx.array, arrays: Arrays, form: RowFormat, *, transpose: bool) -> mx.array:
    """``x @ rows.T`` for ``transpose``, else ``x @ rows``, without dequantising the rows."""
    if form.bits is None:
        return x @ (arrays[0].swapaxes(-1, -2) if transpose else arrays[0])
    words, scales, biases = arrays
    return mx.quantized_matmul(
        x, words, scales, biases, transpose, group_size=form.group_size, bits=form.bits
    )


@dataclass(frozen=True)
class Part:
    """Consecutive rows that a query may see: ``kv_latent`` and ``k_pe``, [B, 1, S, width] each."""

    kv_latent: Arrays
    k_pe: Arrays
    formats: tuple[RowFormat, RowFormat] = (AS_COMPUTED, AS_COMPUTED)

    @classmethod
    def of(cls, arrays: Arrays, formats: tuple[RowFormat, RowFormat]) -> "Part":
        """From the arrays of ``kv_latent`` followed by those of ``k_pe``."""
        n = 1 if formats[0].bits is None else 3
        return cls(arrays[:n], arrays[n:], formats)

    @property
    def length(self) -> int:
        return self.kv_latent[0].shape[2]

    @property
    def quantized(self) -> bool:
        return any(form.bits for form in self.formats)

    def dequantize(self) -> tuple[mx.array, mx.array]:
        """``kv_latent`` [B, 1, S, rank] and ``k_pe`` [B, 1, S, rope] as values."""
        return (
            dequantize(self.kv_latent, self.formats[0]),
            dequantize(self.k_pe, self.formats[1]),
        )

    def rows(self, start: int, stop: int) -> "Part":
        """The rows from ``start`` to before ``stop``."""
        cut = tuple(a[:, :, start:stop] for a in (*self.kv_latent, *self.k_pe))
        return Part.of(cut, self.formats)


@dataclass(frozen=True)
class Causal:
    """Which of S rows each of T queries sees: none later than itself, none outside the window.

    first: position of the first query. positions: int32 [S] of the rows, None: 0 ... S - 1.
    window, sinks: as in ``Policy``.
    """

    first: int
    positions: mx.array | None = None
    window: int | None = None
    sinks: int = 0

    def visible(self, queries: slice, rows: slice) -> mx.array:
        """bool [queries, rows]."""
        q = mx.arange(self.first + queries.start, self.first + queries.stop)[:, None]
        k = mx.arange(rows.start, rows.stop) if self.positions is None else self.positions[rows]
        seen = k <= q
        if self.window is not None:
            seen = seen & ((k > q - self.window) | (k < self.sinks))
        return seen


@dataclass(frozen=True)
class Seen:
    """What the queries of a step attend over: rows in parts, and which query sees which row.

    ``mask`` None: every query sees every row.
    """

    parts: list[Part]
    mask: Causal | mx.array | None = None

    @property
    def length(self) -> int:
        return sum(part.length for part in self.parts)

    @property
    def quantized(self) -> bool:
        return any(part.quantized for part in self.parts)

    def blocks(self, size: int) -> Iterator[tuple[int, Part]]:
        """(first row, Part) of at most ``size`` rows each, in order."""
        at = 0
        for part in self.parts:
            for start in range(0, part.length, size):
                block = part.rows(start, min(start + size, part.length))
                yield at + start, block
            at += part.length

    def dequantize(self) -> tuple[mx.array, mx.array]:
        """All of ``kv_latent`` and of ``k_pe``, in one array each."""
        pairs = [part.dequantize() for part in self.parts]
        if len(pairs) == 1:
            return pairs[0]
        return (
            mx.concatenate([kv_latent for kv_latent, _ in pairs], axis=2),
            mx.concatenate([k_pe for _, k_pe in pairs], axis=2),
        )
