"""Rows of latents as they are kept: as computed, or packed into 8 or 4 bits."""

from dataclasses import dataclass

import mlx.core as mx

Arrays = tuple[mx.array, ...]
# Bytes that one block of expanded keys and values, or of scores, may take. Longer contexts are
# worked through in blocks of heads and of query rows.
WORKSPACE = 64 * 2**20


@dataclass(frozen=True)
class Packing:
    """How rows [..., width] become arrays: themselves, or (packed words, scales, biases).

    ``bits`` None keeps them as they are.
    """

    bits: int | None = None
    group_size: int = 64

    @property
    def arrays(self) -> int:
        return 1 if self.bits is None else 3

    def pack(self, rows: mx.array) -> Arrays:
        if self.bits is None:
            return (rows,)
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))

    def unpack(self, arrays: Arrays) -> mx.array:
        if self.bits is None:
            return arrays[0]
        return mx.dequantize(*arrays, group_size=self.group_size, bits=self.bits)

    def dot(self, x: mx.array, arrays: Arrays) -> mx.array:
        """x [..., T, width] -> its products with every row, [..., T, S]."""
        return self._product(x, arrays, transpose=True)

    def mix(self, weights: mx.array, arrays: Arrays) -> mx.array:
        """weights [..., T, S] -> weighted sums of the rows, [..., T, width]."""
        return self._product(weights, arrays, transpose=False)

    def _product(self, x: mx.array, arrays: Arrays, transpose: bool) -> mx.array:
        if self.bits is None:
            return x @ (arrays[0].swapaxes(-1, -2) if transpose else arrays[0])
        return mx.quantized_matmul(
            x, *arrays, transpose=transpose, group_size=self.group_size, bits=self.bits
        )


PLAIN = Packing()


@dataclass(frozen=True)
class Part:
    """Some consecutive rows of what a query may see: latents and shared keys, [B, 1, S, .]."""

    latents: Arrays
    shared: Arrays
    packing: tuple[Packing, Packing] = (PLAIN, PLAIN)

    @classmethod
    def of(cls, arrays: Arrays, packing: tuple[Packing, Packing]) -> "Part":
        """From the arrays of both, one after the other."""
        n = packing[0].arrays
        return cls(arrays[:n], arrays[n:], packing)

    @property
    def length(self) -> int:
        return self.latents[0].shape[2]

    @property
    def packed(self) -> bool:
        return any(packing.bits for packing in self.packing)

    def unpack(self) -> tuple[mx.array, mx.array]:
        """Latents [B, 1, S, rank] and shared keys [B, 1, S, rope] as numbers."""
        return self.packing[0].unpack(self.latents), self.packing[1].unpack(self.shared)

    def rows(self, start: int, stop: int) -> "Part":
        """The rows from ``start`` to before ``stop``."""
        cut = tuple(a[:, :, start:stop] for a in (*self.latents, *self.shared))
        return Part.of(cut, self.packing)


@dataclass(frozen=True)
class Causal:
    """Which of S rows each of T queries sees: none later than itself, and no farther than allowed.

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
    """What the queries at hand attend over: rows in parts, and the rule of who sees which.

    ``mask`` None: every query sees every row.
    """

    parts: list[Part]
    mask: "Causal | str | mx.array | None" = None

    @property
    def length(self) -> int:
        return sum(part.length for part in self.parts)

    @property
    def packed(self) -> bool:
        return any(part.packed for part in self.parts)

    def blocks(self, size: int):
        """(first row, Part) of at most ``size`` rows each, in order."""
        at = 0
        for part in self.parts:
            for start in range(0, part.length, size):
                block = part.rows(start, min(start + size, part.length))
                yield at + start, block
            at += part.length

    def unpack(self) -> tuple[mx.array, mx.array]:
        """All latents and shared keys, in one piece each."""
        pairs = [part.unpack() for part in self.parts]
        if len(pairs) == 1:
            return pairs[0]
        return tuple(mx.concatenate(arrays, axis=2) for arrays in zip(*pairs, strict=True))
