"""How the next token is chosen from logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

ROOM = 1024  # positions that a buffer has at least


@dataclass(frozen=True)
class Sampling:
    """A sampler, the processors before it, and a seed; mlx-lm's samplers and processors fit.

    sampler: log-probabilities [1, vocabulary] in float32 -> a token [1]; None takes the likeliest.
    processors: (tokens before [n], logits [1, vocabulary]) -> logits.
    seed: the draw of a token then depends on the seed and its position only, so that stopping and
        continuing changes nothing.
    """

    sampler: Sampler | None = None
    processors: Sequence[LogitsProcessor] = ()
    seed: int | None = None

    def draw(self, logits: mx.array, position: int, tokens: "TokenBuffer | None") -> mx.array:
        """The token [1] at ``position``; only processors need the tokens before it."""
        if tokens is not None:
            for processor in self.processors:
                logits = processor(tokens.before(position), logits)
        logits = logits.astype(mx.float32)
        if self.sampler is None:
            return mx.argmax(logits, axis=-1)
        if self.seed is not None:
            # An odd multiplier keeps (seed, position) pairs apart: seed 1 is not seed 0 shifted.
            mx.random.seed((self.seed * 0x9E3779B97F4A7C15 + position) % 2**64)
        return self.sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


class TokenBuffer:
    """A growing sequence of token ids, as logits processors are given it.

    MLX writes into an array in place where nothing else holds it, and a step in flight holds the
    one that it reads. So two buffers take turns, each written while the other is read, and each
    then gets what it has missed: a token costs the same at any length, and none is copied.
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
        """Add ids [n], which need not be evaluated yet."""
        count = tokens.size
        if self.length + count > self._newer.size:
            self._allot(self._newer[: self.length])
        missed = mx.concatenate([*self._missed, tokens.astype(mx.int32)])
        self.length += count
        self._older[self.length - missed.size : self.length] = missed
        self._newer, self._older = self._older, self._newer
        self._missed = [tokens.astype(mx.int32)]

    def before(self, length: int) -> mx.array:
        """The first ``length`` ids: int32 [length]."""
        return self._newer[:length]

    def cut(self, length: int) -> None:
        """Forget what comes after the first ``length`` ids."""
        held = self.length - sum(part.size for part in self._missed)  # that both buffers have
        self.length = length
        self._missed = [self._newer[held:length]] if held < length else []
