"""Snapshots of a whole cache, and the checkpoints of a sequence that hold them.

A KDA state cannot be trimmed, so a snapshot holds it. Latents of every token need no copy: going
back is to forget the later ones. A ring overwrites its past, so a snapshot holds the ring.
"""

from collections.abc import Callable, Iterator
from copy import copy as copy_object
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import ArraysCache, KVCache

from ..errors import UserError
from . import DEFAULT_BUDGET
from .latent_cache import LatentCache

NEWEST_KEPT = 2  # automatic checkpoints that thinning leaves alone: those of the last turn

# Of each entry: the arrays of an ArraysCache, the length of a KVCache, what a LatentCache needs.
Snapshot = list[Any]


def snapshot(cache: list[Any], ahead: int | None = None) -> Snapshot:
    """The cache as it is now, by reference: MLX arrays are values, later steps do not change them.

    With ``ahead`` the snapshot is good for undoing that many tokens, and a ring may be written in
    place where they are few.
    """
    return [
        entry.storage.snapshot(ahead)
        if isinstance(entry, LatentCache)
        else entry.offset
        if isinstance(entry, KVCache)
        else list(entry.cache)
        for entry in cache
    ]


def restore(cache: list[Any], point: Snapshot) -> None:
    """Bring the cache back to a snapshot of its own past, which can be used again."""
    for entry, held in zip(cache, point, strict=True):
        if isinstance(entry, LatentCache):
            entry.storage.restore(held)
        elif isinstance(entry, KVCache):
            entry.offset = held
        else:
            entry.cache = list(held)


def detach(point: Snapshot) -> Snapshot:
    """The snapshot with evaluated arrays of its own, which keep no larger buffer alive."""
    own: Snapshot = tree_map(lambda a: mx.contiguous(a) if isinstance(a, mx.array) else a, point)
    mx.eval(own)
    return own


def copy(cache: list[Any]) -> list[Any]:
    """Another cache with the same content; buffers are shared until one of the two writes."""
    return [_copy(entry) for entry in cache]


def _copy(entry: Any) -> Any:
    if isinstance(entry, LatentCache):
        return entry.copy()
    other = copy_object(entry)
    if isinstance(entry, KVCache):
        if entry.keys is not None:
            other.keys, other.values = mx.array(entry.keys), mx.array(entry.values)
    else:
        other.cache = list(entry.cache)
    return other


def supported(cache: list[Any]) -> bool:
    """Whether every entry is of a kind that these functions know."""
    return all(isinstance(entry, (LatentCache, KVCache, ArraysCache)) for entry in cache)


def check_supported(cache: list[Any]) -> None:
    """Raise UserError for a cache of which no snapshot can be taken."""
    if not supported(cache):
        kinds = {type(e).__name__ for e in cache} - {"LatentCache", "KVCache", "ArraysCache"}
        raise UserError(f"a cache of {', '.join(sorted(kinds))} cannot be rewound or copied")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a cache needs in order to return to the first ``offset`` tokens of its sequence.

    It holds copies of the KDA states, of windows' rings and of the last logits. Latents that the
    policy keeps for every token are not copied: the cache still has them, so a checkpoint is valid
    for the cache it was taken from, until that is rewound to before it.
    """

    offset: int
    snapshot: Snapshot = field(repr=False)
    logits: mx.array | None = field(repr=False)
    automatic: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes held by this checkpoint alone."""
        held = dict(tree_flatten([self.snapshot, self.logits])).values()
        return sum(a.nbytes for a in held if isinstance(a, mx.array))


class Checkpoints:
    """The checkpoints of one sequence, in order, the automatic ones within a budget of bytes.

    Over the budget the automatic ones are thinned, beginning with the oldest part: of those before
    the newest two, the one is dropped whose neighbours are nearest together relative to its
    distance from the end. That leaves them dense at the end and ever sparser towards the beginning.
    What a user took stays until it is dropped, and counts.
    """

    def __init__(self, budget: int = DEFAULT_BUDGET):
        self.budget = budget
        self._items: list[Checkpoint] = []

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, checkpoint: object) -> bool:
        return any(item is checkpoint for item in self._items)

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self._items)

    def add(
        self, offset: int, snapshot: Snapshot, logits: mx.array | None, automatic: bool = False
    ) -> Checkpoint:
        """Add a checkpoint and return it.

        An automatic one is not kept where there is one at the same offset, and is replaced by one
        that a user takes there.
        """
        checkpoint = Checkpoint(offset, snapshot, logits, automatic)
        if automatic and any(item.offset == offset for item in self._items):
            return checkpoint
        self._keep(lambda item: not (item.automatic and item.offset == offset))
        self._items.append(checkpoint)
        self._items.sort(key=lambda item: item.offset)
        while self.nbytes > self.budget and (victim := self._least_useful()) is not None:
            self.drop(victim)
        return checkpoint

    def drop(self, checkpoint: Checkpoint) -> None:
        self._keep(lambda item: item is not checkpoint)

    def drop_after(self, offset: int) -> None:
        """Drop those beyond ``offset``: the sequence there is about to change."""
        self._keep(lambda item: item.offset <= offset)

    def clear(self) -> None:
        self._items = []

    def nearest(self, offset: int) -> Checkpoint | None:
        """The last one at or before ``offset``."""
        return next((item for item in reversed(self._items) if item.offset <= offset), None)

    def to_save(self) -> list[Checkpoint]:
        """Those that a session file keeps: a user's, and the newest automatic ones."""
        newest = [item for item in self._items if item.automatic][-NEWEST_KEPT:]
        return [item for item in self._items if not item.automatic or item in newest]

    def copy(self) -> "Checkpoints":
        other = Checkpoints(self.budget)
        other._items = list(self._items)
        return other

    def _keep(self, wanted: Callable[[Checkpoint], bool]) -> None:
        self._items = [item for item in self._items if wanted(item)]

    def _least_useful(self) -> Checkpoint | None:
        automatic = [item for item in self._items if item.automatic]
        if len(automatic) <= NEWEST_KEPT:
            # A budget for fewer than these is kept to as well, from the oldest.
            return automatic[0] if automatic else None
        end = automatic[-1].offset
        place = {id(item): i for i, item in enumerate(self._items)}

        def loss(item: Checkpoint) -> float:
            i = place[id(item)]
            before = self._items[i - 1].offset if i else 0
            after = self._items[i + 1].offset
            return (after - before) / max(end - item.offset, 1)

        return min(automatic[:-NEWEST_KEPT], key=loss)
