"""Where rows of latents live: blocks that grow with the text, or a ring that does not.

MLX arrays are values: writing into one whose buffer anything else holds copies the whole of it
first, and a step in flight holds every buffer it reads. So a decode step that runs ahead of the
one before must not write into a long array. ``Blocks`` writes steps into a short tail, and moves
the tail into the long blocks once every ``TAIL`` tokens, when nothing is in flight.
"""

import functools

import mlx.core as mx
import numpy as np

from .policy import SPARE
from .quantized_rows import Arrays

TAIL = 256
FIRST_BLOCK = 4096  # rows that are written in place: a copy of so few costs nothing


class Blocks:
    """Every row, in blocks of fixed place; a new block is half as large as all before it.

    No row is ever copied again after it has reached its block.
    """

    def __init__(self):
        self.blocks: list[Arrays] = []
        self.settled = 0  # rows in the blocks; the rows after them are in the tail
        self.tail: Arrays | None = None
        self.length = 0

    def append(self, rows: Arrays) -> None:
        T = rows[0].shape[2]
        in_tail = self.length - self.settled
        if T < TAIL and in_tail + T <= TAIL and self.settled >= FIRST_BLOCK:
            if self.tail is None:
                self.tail = tuple(_empty(a, TAIL) for a in rows)
            self.tail = _written(self.tail, in_tail, rows)
        else:
            if in_tail:
                waiting = tuple(a[:, :, :in_tail] for a in self.tail)
                # Nothing in flight holds the blocks after this, so the write is in place.
                mx.eval(waiting)
                mx.synchronize()
                self._settle(waiting)
            self._settle(rows)
        self.length += T

    def _settle(self, rows: Arrays) -> None:
        T, done = rows[0].shape[2], 0
        while done < T:
            index, start, room = self._place(rows)
            n = min(room, T - done)
            piece = tuple(a[:, :, done : done + n] for a in rows)
            self.blocks[index] = _written(self.blocks[index], start, piece)
            self.settled += n
            done += n

    def _place(self, rows: Arrays) -> tuple[int, int, int]:
        """(block, row in it, rows free) for the next row; a new block if all are full."""
        first = 0
        for index, block in enumerate(self.blocks):
            size = block[0].shape[2]
            if self.settled < first + size:
                return index, self.settled - first, first + size - self.settled
            first += size
        size = max(FIRST_BLOCK, first // 2 // TAIL * TAIL)
        self.blocks.append(tuple(_empty(a, size) for a in rows))
        return len(self.blocks) - 1, 0, size

    def parts(self) -> list[Arrays]:
        """All rows in order; the arrays of a part side by side."""
        found, first = [], 0
        for block in self.blocks:
            n = min(self.settled - first, block[0].shape[2])
            if n <= 0:
                break
            found.append(tuple(a[:, :, :n] for a in block))
            first += n
        if self.length > self.settled:
            found.append(tuple(a[:, :, : self.length - self.settled] for a in self.tail))
        return found

    def arrays(self) -> list[mx.array]:
        return [a for block in self.blocks for a in block] + list(self.tail or ())

    def mark(self, ahead: int | None = None) -> int:
        """The length is enough to come back: rows before it are never written again."""
        return self.length

    def back(self, mark: int) -> None:
        self.length = mark
        self.settled = min(self.settled, mark)

    def clone(self) -> "Blocks":
        """Another store with the same rows; shared buffers are copied by the one that writes."""
        other = Blocks()
        other.blocks = [_handles(block) for block in self.blocks]
        other.tail = None if self.tail is None else _handles(self.tail)
        other.settled, other.length = self.settled, self.length
        return other

    def load(self, arrays: Arrays, length: int) -> None:
        self.append(arrays)


class Ring:
    """The first ``sinks`` rows and the last ``window`` of the others, in slots of fixed number.

    Row p < sinks has slot p; any later row has slot sinks + (p - sinks) mod (window + SPARE). The
    slots in use are always the first ones. The spare rows are out of the window already, so that
    the last few tokens can be taken back by forgetting them.
    """

    def __init__(self, window: int, sinks: int):
        self.window, self.sinks = window, sinks
        self.turn = window + SPARE  # slots that rows after the sinks go round in
        self.slots: Arrays | None = None
        self.length = 0

    @property
    def used(self) -> int:
        return min(self.length, self.sinks + self.turn)

    def append(self, rows: Arrays) -> None:
        if self.slots is None:
            self.slots = tuple(_empty(a, self.sinks + self.turn) for a in rows)
        p, end = self.length, self.length + rows[0].shape[2]
        while p < end:
            if p < self.sinks:
                slot, n = p, min(self.sinks, end) - p
            else:
                p = max(p, end - self.turn)  # what would be overwritten at once is left out
                place = (p - self.sinks) % self.turn
                slot, n = self.sinks + place, min(end - p, self.turn - place)
            piece = tuple(a[:, :, p - self.length : p - self.length + n] for a in rows)
            self.slots = _written(self.slots, slot, piece)
            p += n
        self.length = end

    def parts(self) -> list[Arrays]:
        return [tuple(a[:, :, : self.used] for a in self.slots)] if self.used else []

    def positions(self) -> mx.array:
        """int32 [used]: the position of the row in each slot."""
        return _positions(self.length, self.used, self.sinks, self.turn)

    def mask(self) -> mx.array | None:
        """bool [1, used]: what the last token sees; None where that is all."""
        if self.length <= self.sinks + self.window:
            return None
        return _last_mask(self.length, self.used, self.sinks, self.turn, self.window)

    def arrays(self) -> list[mx.array]:
        return list(self.slots or ())

    def mark(self, ahead: int | None = None) -> int | tuple[int, Arrays | None]:
        """The length, where at most ``ahead`` spare rows will be taken back; else the slots too."""
        if ahead is not None and ahead <= SPARE:
            return self.length
        return self.length, None if self.slots is None else _handles(self.slots)

    def back(self, mark: int | tuple[int, Arrays | None]) -> None:
        if isinstance(mark, int):
            if self.length - mark > SPARE:
                raise RuntimeError(f"{self.length - mark} rows to take back, {SPARE} are spare")
            self.length = mark
            return
        self.length, slots = mark
        self.slots = None if slots is None else _handles(slots)

    def clone(self) -> "Ring":
        other = Ring(self.window, self.sinks)
        other.back(self.mark())
        return other

    def export(self) -> Arrays | None:
        return self.slots if self.used else None

    def load(self, arrays: Arrays, length: int) -> None:
        self.slots, self.length = arrays, length


# All layers ask the same in a step. Made by numpy, they are values at once and belong to no graph.
@functools.lru_cache(maxsize=4)
def _positions(length: int, used: int, sinks: int, turn: int) -> mx.array:
    return mx.array(_latest(length, used, sinks, turn))


@functools.lru_cache(maxsize=4)
def _last_mask(length: int, used: int, sinks: int, turn: int, window: int) -> mx.array:
    positions = _latest(length, used, sinks, turn)
    return mx.array(((positions >= length - window) | (positions < sinks))[None])


def _latest(length: int, used: int, sinks: int, turn: int) -> np.ndarray:
    """int32 [used]: the last row written to each slot, the latest p < length that goes there."""
    slot = np.arange(used, dtype=np.int32)
    rounds = (length - 1 - slot) // turn * turn
    return np.where(slot < sinks, slot, slot + rounds)


def _empty(like: mx.array, rows: int) -> mx.array:
    return mx.zeros((*like.shape[:2], rows, like.shape[3]), dtype=like.dtype)


def _written(block: Arrays, start: int, rows: Arrays) -> Arrays:
    for array, new in zip(block, rows, strict=True):
        array[:, :, start : start + new.shape[2]] = new
    return block


def _handles(arrays: Arrays) -> Arrays:
    """Other handles to the same values: writing through one leaves the other as it was."""
    return tuple(mx.array(a) for a in arrays)
