"""How the next token is chosen from logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Sampling:
    """A sampler, the processors before it, and a seed: mlx-lm's own functions fit.

    sampler: log-probabilities [1, vocabulary] in float32 -> a token [1]; None takes the likeliest.
    processors: (tokens before [n], logits [1, vocabulary]) -> logits.
    seed: the draw of a token then depends on the seed and its position only, so that stopping and
        going on changes nothing.
    """

    sampler: Sampler | None = None
    processors: Sequence[LogitsProcessor] = ()
    seed: int | None = None

    def draw(self, logits: mx.array, history: mx.array | None, position: int) -> mx.array:
        """The token [1] at ``position``; ``history`` is needed by processors alone."""
        for processor in self.processors:
            logits = processor(history, logits)
        logits = logits.astype(mx.float32)
        if self.sampler is None:
            return mx.argmax(logits, axis=-1)
        if self.seed is not None:
            mx.random.seed(_mix(self.seed, position))
        return self.sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def _mix(seed: int, position: int) -> int:
    # An odd multiplier keeps (seed, position) pairs apart: seed 1 is not seed 0 shifted.
    return (seed * 0x9E3779B97F4A7C15 + position) % 2**64
