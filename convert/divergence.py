"""Distributions of the next token beside the first model's, some of the vocabulary at a time.

With logits a of the first model and b of another, over the vocabulary v,

    KL = sum_v p_v (a_v - b_v) + lse(b) - lse(a),    p_v = exp(a_v - lse(a)),

where lse is the logarithm of the sum of exponentials. The sums are carried from block to block,
relative to the largest logit so far.
"""

import mlx.core as mx


class Divergence:
    """KL(first | other) and top-1 agreement of some `others` on a number of tokens."""

    def __init__(self, tokens: int, others: int):
        low = mx.full((tokens,), -mx.inf)
        self._top = [low] * (others + 1)  # largest logit
        self._sum = [mx.zeros((tokens,))] * (others + 1)  # of exp(logit - largest)
        self._best = [mx.zeros((tokens,), dtype=mx.int32)] * (others + 1)  # where it is
        self._gap = [mx.zeros((tokens,))] * others  # sum of exp(a - largest a) (a - b)
        self._start = 0

    def add(self, logits: list[mx.array]) -> None:
        """The next block of the vocabulary: float32 [tokens, block] of each model."""
        first = logits[0]
        for model, x in enumerate(logits):
            top = mx.maximum(self._top[model], x.max(axis=-1))
            best = mx.argmax(x, axis=-1).astype(mx.int32) + self._start
            self._best[model] = mx.where(top > self._top[model], best, self._best[model])
            scale = mx.exp(self._top[model] - top)  # of what was summed before
            raised = mx.exp(x - top[:, None])
            self._sum[model] = self._sum[model] * scale + raised.sum(axis=-1)
            self._top[model] = top
            if model == 0:
                weights, old = raised, scale
            else:
                gap = (weights * (first - x)).sum(axis=-1)
                self._gap[model - 1] = self._gap[model - 1] * old + gap
        self._start += first.shape[-1]
        mx.eval(self._top, self._sum, self._best, self._gap)

    def found(self) -> list[tuple[float, float, float]]:
        """(mean KL, largest KL, share of tokens with the same likeliest next one) of the others."""
        result = []
        for other, gap in enumerate(self._gap, start=1):
            rise = self._top[other] - self._top[0]  # first: logarithms of sums are small beside it
            rise = rise + mx.log(self._sum[other] / self._sum[0])
            kl = mx.maximum(gap / self._sum[0] + rise, 0)  # below 0 is rounding
            same = (self._best[0] == self._best[other]).sum().item() / kl.size
            result.append((kl.mean().item(), kl.max().item(), same))
        return result
