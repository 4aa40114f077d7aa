"""Softmax attention over keys and values that come in blocks."""

import mlx.core as mx

from ..ops.elementwise import exp


class RunningSoftmax:
    """``softmax(scores) @ values`` over all blocks added, held as maximum, sum and weighted sum.

    ::

        m' = max(m, max(scores));  p = exp(scores - m')
        sum = sum * exp(m - m') + sum(p);  acc = acc * exp(m - m') + p @ values

    in float32, whatever the blocks are.
    """

    def __init__(self):
        self.max: mx.array | None = None
        self.sum: mx.array | None = None
        self.acc: mx.array | None = None

    def add(self, scores: mx.array, values: mx.array) -> None:
        """scores [..., T, S]; values [..., S, D]."""
        scores = scores.astype(mx.float32)
        top = scores.max(axis=-1, keepdims=True)
        if self.max is not None:
            top = mx.maximum(self.max, top)
        weights = exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        mixed = (weights.astype(values.dtype) @ values).astype(mx.float32)
        if self.max is not None:
            kept = exp(self.max - top)
            total, mixed = self.sum * kept + total, self.acc * kept + mixed
        self.max, self.sum, self.acc = top, total, mixed

    def result(self, dtype: mx.Dtype) -> mx.array:
        """The weighted mean of all values, [..., T, D]."""
        return (self.acc / self.sum).astype(dtype)
