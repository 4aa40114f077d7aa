"""A model that says what it is told, to test what is done with its tokens."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache


class Scripted(nn.Module):
    """After ``start`` tokens of prompt it says ``script``, one token a step, then token 0.

    Its one cache entry counts the tokens absorbed, so what it says depends on the cache alone.
    ``poison`` is the number of absorbed tokens from which on its logits are NaN.
    """

    def __init__(
        self, vocabulary: int, start: int, script: Sequence[int], poison: int | None = None
    ):
        super().__init__()
        self.vocabulary = vocabulary
        self.start = start
        self.script = list(script)
        self.poison = poison
        self.calls: list[int] = []  # tokens of every call

    def make_cache(self) -> list[ArraysCache]:
        return [ArraysCache(size=1)]

    def __call__(self, inputs: mx.array, cache: list[ArraysCache]) -> mx.array:
        T = inputs.shape[1]
        self.calls.append(T)
        seen = cache[0][0]
        seen = mx.array([0]) if seen is None else seen
        cache[0][0] = seen + T
        absorbed = seen + 1 + mx.arange(T)
        # Script positions before the first and past the last one say 0.
        words = mx.array([0, *self.script, 0])
        said = words[mx.clip(absorbed - self.start + 1, 0, len(self.script) + 1)]
        logits = mx.where(mx.arange(self.vocabulary) == said[:, None], 10.0, 0.0)[None]
        if self.poison is not None:
            logits = mx.where((absorbed >= self.poison)[None, :, None], mx.nan, logits)
        return logits
