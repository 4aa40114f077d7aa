"""RMSNorm that keeps the activations' dtype."""

from functools import lru_cache, partial

import mlx.core as mx
import mlx.nn as nn

# Up to this many rows, the number of operations bounds the time on the CPU.
_FEW = 64


class RMSNorm(nn.RMSNorm):
    """`rms_norm` with a weight."""

    def __call__(self, x: mx.array) -> mx.array:
        return rms_norm(x, self["weight"], self.eps)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, float32 inside.

    The result has the dtype of ``x`` even where the weight is float32: MLX would promote, and one
    such weight would make every later layer float32.
    """
    if x.size <= _FEW * x.shape[-1] and mx.default_device() == mx.cpu:
        return _few_rows(x, weight, *_constants(eps, x.shape[-1]))
    return mx.fast.rms_norm(x, weight, eps).astype(x.dtype)


@lru_cache(maxsize=64)
def _constants(eps: float, width: int) -> tuple[mx.array, mx.array]:
    """eps and 1 / width as arrays: as Python floats, each pair would be compiled separately."""
    made = mx.array(eps), mx.array(1 / width)
    mx.eval(made)
    return made


@partial(mx.compile, shapeless=True)
def _few_rows(x: mx.array, weight: mx.array, eps: mx.array, share: mx.array) -> mx.array:
    """The same in three operations; MLX has no CPU kernel for it and takes nine."""
    wide = x.astype(mx.float32)
    square = (wide * wide).sum(axis=-1, keepdims=True)
    return (wide * mx.rsqrt(square * share + eps) * weight).astype(x.dtype)
