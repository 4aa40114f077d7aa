"""The cache of one MLA layer under a policy, and the cache of a whole model.

MLX arrays are values: writing into one whose buffer anything else holds copies all of it first, and
a step in flight holds every buffer that it reads. A decode step that runs ahead of the one before
must therefore not write into a long array. ``Blocks`` writes such steps into a short tail, and
moves the tail into the long blocks once every ``TAIL`` tokens, when nothing is in flight.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache

from ..errors import UserError
from .policy import SPARE, Policy, RowFormat
from .quantized_rows import Arrays, Causal, Part, Seen, quantize

TAIL = 256
FIRST_BLOCK = 4096  # rows that are written in place: a copy of so few costs nothing

# What a storage needs in order to return to an earlier length.
StorageSnapshot = int | tuple[int, Arrays]


def make_cache(model: Any, policy: str | Policy = "exact", *, portable: bool = True) -> list[Any]:
    """An empty cache for ``model``, one entry per layer.

    A KDA layer gets four arrays that never grow (the q, k and v windows, the state) in mlx-lm's
    ArraysCache. An MLA layer gets a LatentCache under ``policy``; under the exact policy and
    ``portable`` it gets mlx-lm's KVCache instead (keys are ``kv_latent`` [B, 1, S, kv_lora_rank],
    values ``k_pe`` [B, 1, S, rope]), which mlx-lm's batching, saving and server know.

    Raises:
        UserError: a policy that does not exist, or that the model's shapes do not allow.
    """
    chosen = Policy.parse(policy)
    kinds = model.args.layer_types
    if "mla" in kinds:
        chosen.row_formats(model.args.kv_lora_rank, model.args.qk_rope_head_dim)
    new = KVCache if chosen.exact and portable else functools.partial(LatentCache, chosen)
    return [ArraysCache(size=4) if kind == "kda" else new() for kind in kinds]


def cache_maker(model: Any, policy: Policy) -> Callable[[], list[Any]]:
    """A function that makes an empty cache under the policy, for any model of mlx-lm's interface.

    Raises UserError where the model knows no policies and another than exact is asked for.
    """
    if "policy" in inspect.signature(type(model).make_cache).parameters:
        return functools.partial(make_cache, model, policy, portable=False)
    if not policy.exact:
        raise UserError(f"{type(model).__module__} supports the cache policy exact, not {policy}")
    return model.make_cache


class LatentCache:
    """What one MLA layer keeps of a sequence: ``kv_latent`` and ``k_pe`` rows under a policy.

    ``absorb`` takes the tokens of a step and returns what they attend over. Under a window every
    query sees the first ``sinks`` tokens and the last ``window`` ones, including itself, so the
    result does not depend on how the sequence is split into chunks. For the same reason every query
    reads quantised rows, those of its own chunk too.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.storage: Blocks | Ring = (
            Blocks() if policy.window is None else Ring(policy.window, policy.sinks)
        )
        self.formats: tuple[RowFormat, RowFormat] | None = None  # known with the first rows

    @property
    def offset(self) -> int:
        """Tokens absorbed."""
        return self.storage.length

    def absorb(self, kv_latent: mx.array, k_pe: mx.array) -> Seen:
        """Add ``kv_latent`` [B, 1, T, rank] and ``k_pe`` [B, 1, T, rope]; what the queries see."""
        if self.formats is None:
            self.formats = self.policy.row_formats(kv_latent.shape[-1], k_pe.shape[-1])
        rows = (*quantize(kv_latent, self.formats[0]), *quantize(k_pe, self.formats[1]))
        first, T = self.offset, kv_latent.shape[2]
        storage = self.storage
        mask: Causal | mx.array | None
        if isinstance(storage, Blocks):
            storage.append(rows)
            parts, mask = storage.parts(), None if T == 1 else Causal(first)
        elif T == 1:
            storage.append(rows)
            parts, mask = storage.parts(), storage.mask()
        else:
            # Queries early in the chunk still see rows that its end overwrites.
            parts = [*storage.parts(), rows]
            positions = mx.concatenate([storage.positions(), mx.arange(first, first + T)])
            mask = Causal(first, positions, storage.window, storage.sinks)
            storage.append(rows)
        return Seen([Part.of(arrays, self.formats) for arrays in parts], mask)

    def make_mask(self, T: int, **options: Any) -> None:
        """No mask: ``absorb`` returns one."""

    @property
    def state(self) -> list[mx.array]:
        """Every array, to be evaluated with a step."""
        return self.storage.arrays()

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, spare room included."""
        return sum(a.nbytes for a in self.storage.arrays())

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def is_trimmable(self) -> bool:
        return False

    def copy(self) -> "LatentCache":
        """Another cache with the same rows; shared buffers are copied by the one that writes."""
        other = LatentCache(self.policy)
        other.storage, other.formats = self.storage.copy(), self.formats
        return other

    def export(self) -> list[list[mx.array]]:
        """The arrays of a session file, each in parts along the rows."""
        if isinstance(self.storage, Blocks):
            return [list(parts) for parts in zip(*self.storage.parts(), strict=True)]
        return [[array] for array in self.storage.arrays()] if self.storage.used else []

    def restore(self, arrays: Arrays, tokens: int) -> None:
        """Take what ``export`` gave after so many tokens, into an empty cache."""
        if isinstance(self.storage, Blocks):
            self.storage.append(arrays)
        else:
            self.storage.slots, self.storage.length = arrays, tokens
        mx.eval(self.state)


class Blocks:
    """Every row, in blocks of fixed size; a new block is half as large as all before it.

    A row is never copied again after it has reached its block.
    """

    def __init__(self) -> None:
        self.blocks: list[Arrays] = []
        self.settled = 0  # rows in the blocks; the rows after them are in the tail
        self.tail: Arrays = ()
        self.length = 0

    def append(self, rows: Arrays) -> None:
        T = rows[0].shape[2]
        in_tail = self.length - self.settled
        if T < TAIL and in_tail + T <= TAIL and self.settled >= FIRST_BLOCK:
            if not self.tail:
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
        """Write rows into the blocks, and into new ones where all are full."""
        T, done, index, first = rows[0].shape[2], 0, 0, 0
        while done < T:
            if index == len(self.blocks):
                size = max(FIRST_BLOCK, first // 2 // TAIL * TAIL)
                self.blocks.append(tuple(_empty(a, size) for a in rows))
            block = self.blocks[index]
            size, start = block[0].shape[2], self.settled - first
            if start < size:
                n = min(size - start, T - done)
                for array, new in zip(block, rows, strict=True):
                    array[:, :, start : start + n] = new[:, :, done : done + n]
                self.settled += n
                done += n
            first += size
            index += 1

    def parts(self) -> list[Arrays]:
        """All rows in order; the arrays of a part side by side."""
        found: list[Arrays] = []
        first = 0
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
        return [a for block in self.blocks for a in block] + list(self.tail)

    def snapshot(self, ahead: int | None = None) -> StorageSnapshot:
        """The length is enough: rows before it are never written again."""
        return self.length

    def restore(self, snapshot: StorageSnapshot) -> None:
        assert isinstance(snapshot, int)
        self.length = snapshot
        self.settled = min(self.settled, snapshot)

    def copy(self) -> "Blocks":
        other = Blocks()
        other.blocks = [_handles(block) for block in self.blocks]
        other.tail = _handles(self.tail)
        other.settled, other.length = self.settled, self.length
        return other


class Ring:
    """The first ``sinks`` rows and the last ``window`` of the others, in a fixed number of slots.

    Row p < sinks has slot p; any later row has slot sinks + (p - sinks) mod (window + SPARE). The
    slots in use are always the first ones. The spare rows are out of the window already, so the
    last few tokens can be undone by changing the length alone.
    """

    def __init__(self, window: int, sinks: int):
        self.window, self.sinks = window, sinks
        self.turn = window + SPARE  # slots in which the rows after the sinks rotate
        self.slots: Arrays = ()
        self.length = 0

    @property
    def used(self) -> int:
        return min(self.length, self.sinks + self.turn)

    def append(self, rows: Arrays) -> None:
        if not self.slots:
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
        return list(self.slots)

    def snapshot(self, ahead: int | None = None) -> StorageSnapshot:
        """The length, where at most ``ahead`` spare rows will be undone; else the slots too."""
        if ahead is not None and ahead <= SPARE:
            return self.length
        return self.length, _handles(self.slots)

    def restore(self, snapshot: StorageSnapshot) -> None:
        if isinstance(snapshot, int):
            if self.length - snapshot > SPARE:
                raise RuntimeError(f"{self.length - snapshot} rows to undo, {SPARE} are spare")
            self.length = snapshot
            return
        self.length, slots = snapshot
        self.slots = _handles(slots)

    def copy(self) -> "Ring":
        other = Ring(self.window, self.sinks)
        other.restore(self.snapshot())
        return other


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
