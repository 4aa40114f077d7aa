"""Checkpoints of one cache: places in a text that it can come back to without reading it again."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import mlx.core as mx

from . import DEFAULT_BUDGET
from .snapshot import Mark, nbytes

NEWEST_KEPT = 2  # automatic ones that thinning leaves alone: the last turn's


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """All that a cache needs to come back to ``offset`` tokens of a text.

    It holds copies of the KDA states, of windows' rings and of the last logits. Latents that the
    policy keeps for every token are not copied: the cache still has them, so a checkpoint is good
    for the cache it was taken from, until that goes back before it.
    """

    offset: int
    mark: Mark = field(repr=False)
    logits: mx.array | None = field(repr=False)
    automatic: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes held by this checkpoint alone."""
        return nbytes(self.mark) + (0 if self.logits is None else self.logits.nbytes)


class Checkpoints:
    """The checkpoints of one text, in order, the automatic ones within a budget of bytes.

    Over the budget the automatic ones are thinned, the oldest part first: of those before the
    newest two the one goes whose neighbours are nearest together for their distance from the end,
    which leaves them dense at the end and ever sparser towards the beginning. What a user took
    stays until it is dropped, and counts.
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

    def add(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint; an automatic one at the same place gives way to it."""
        if checkpoint.automatic and self.at(checkpoint.offset) is not None:
            return
        self._items = [
            item
            for item in self._items
            if not (item.automatic and item.offset == checkpoint.offset)
        ]
        self._items.append(checkpoint)
        self._items.sort(key=lambda item: item.offset)
        while self.nbytes > self.budget and (victim := self._least_missed()) is not None:
            self.drop(victim)

    def drop(self, checkpoint: Checkpoint) -> None:
        self._items = [item for item in self._items if item is not checkpoint]

    def drop_after(self, offset: int) -> None:
        """Forget those beyond ``offset``: the text there is about to become another."""
        self._items = [item for item in self._items if item.offset <= offset]

    def clear(self) -> None:
        self._items = []

    def at(self, offset: int) -> Checkpoint | None:
        return next((item for item in self._items if item.offset == offset), None)

    def nearest(self, offset: int) -> Checkpoint | None:
        """The last one at or before ``offset``."""
        return next((item for item in reversed(self._items) if item.offset <= offset), None)

    def copy(self) -> "Checkpoints":
        other = Checkpoints(self.budget)
        other._items = list(self._items)
        return other

    def _least_missed(self) -> Checkpoint | None:
        automatic = [item for item in self._items if item.automatic]
        if len(automatic) <= NEWEST_KEPT:
            # A budget for less than two is kept to as well, from the oldest.
            return automatic[0] if automatic else None
        end = automatic[-1].offset
        place = {id(item): i for i, item in enumerate(self._items)}

        def loss(item: Checkpoint) -> float:
            i = place[id(item)]
            before = self._items[i - 1].offset if i else 0
            after = self._items[i + 1].offset
            return (after - before) / max(end - item.offset, 1)

        return min(automatic[:-NEWEST_KEPT], key=loss)
