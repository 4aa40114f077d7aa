"""The tokens before a draw, as logits processors are given them."""

from collections.abc import Sequence

import mlx.core as mx

ROOM = 1024  # positions that a buffer has at least


class History:
    """A growing text of token ids whose arrays [n] share a buffer instead of copying it.

    MLX writes into an array in place where nothing else holds it, and a step in flight holds the
    one that it reads. So two buffers take turns, each written while the other is read, and each
    then gets what it has missed: a token costs the same at any length.
    """

    def __init__(self, tokens: Sequence[int]):
        self.length = len(tokens)
        self._allot(mx.array(list(tokens), dtype=mx.int32))

    def _allot(self, tokens: mx.array) -> None:
        """Two buffers with twice the room for ``tokens``."""
        empty = mx.zeros((max(self.length, ROOM),), dtype=mx.int32)
        self._newer, self._older = (mx.concatenate([tokens, empty]) for _ in range(2))
        mx.eval(self._newer, self._older)
        self._missed: list[mx.array] = []  # by the older one, up to ``length``

    def extend(self, tokens: mx.array) -> None:
        """Add ids [n], which need not be known yet."""
        count = tokens.size
        if self.length + count > self._newer.size:
            self._allot(self._newer[: self.length])
        missed = mx.concatenate([*self._missed, tokens.astype(mx.int32)])
        self.length += count
        self._older[self.length - missed.size : self.length] = missed
        self._newer, self._older = self._older, self._newer
        self._missed = [tokens.astype(mx.int32)]

    def before(self, length: int | None = None) -> mx.array:
        """The first ``length`` ids, by default all: int32 [length]."""
        return self._newer[: self.length if length is None else length]

    def cut(self, length: int) -> None:
        """Forget what comes after the first ``length`` ids."""
        held = self.length - sum(part.size for part in self._missed)  # that both buffers have
        self.length = length
        self._missed = [self._newer[held:length]] if held < length else []
