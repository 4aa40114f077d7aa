"""RMSNorm that keeps the activations' dtype."""

import mlx.core as mx
import mlx.nn as nn


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, float32 inside.

    The result has the dtype of ``x`` even where the weight is float32: MLX would promote, and one
    such weight turns every later layer float32.
    """

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self["weight"], self.eps).astype(x.dtype)
