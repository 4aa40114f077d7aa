"""exp, sigmoid, softplus and SiLU, accurate to float32 on the CPU too.

MLX's CPU build computes exp with errors up to 1e-6. float32 arrays there are computed from expm1,
which MLX has right, to within 3e-7, so that a sequence split elsewhere gives the same results::

    exp(x) = 1 + expm1(x), or 1 / (1 + expm1(-x)) below 0

Other dtypes and devices take MLX's own.
"""

from functools import partial

import mlx.core as mx
import mlx.nn as nn

# exp of more overflows, and then the gradient of 1 / exp would be NaN.
_LARGEST = 88.72

_fused = partial(mx.compile, shapeless=True)


def exp(x: mx.array) -> mx.array:
    return _exact_exp(x) if _on_cpu(x) else mx.exp(x)


def sigmoid(x: mx.array) -> mx.array:
    return _exact_sigmoid(x) if _on_cpu(x) else mx.sigmoid(x)


def softplus(x: mx.array) -> mx.array:
    """``log(1 + exp(x))``"""
    return _exact_softplus(x) if _on_cpu(x) else nn.softplus(x)


def gated(x: mx.array, z: mx.array) -> mx.array:
    """``x * sigmoid(z)``, of one shape and dtype."""
    return _exact_gated(x, z) if _on_cpu(x) else _mlx_gated(x, z)


def silu(x: mx.array) -> mx.array:
    """``x * sigmoid(x)``"""
    return gated(x, x)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """``silu(gate) * x``"""
    return _exact_swiglu(gate, x) if _on_cpu(gate) else _mlx_swiglu(gate, x)


def _on_cpu(x: mx.array) -> bool:
    return x.dtype == mx.float32 and mx.default_device() == mx.cpu


@_fused
def _exact_exp(x: mx.array) -> mx.array:
    tiny = x < -_LARGEST
    x = mx.where(tiny, 0, x)
    above = 1 + mx.expm1(mx.abs(x))
    return mx.where(tiny, 0, mx.where(x > 0, above, 1 / above))


@_fused
def _exact_sigmoid(x: mx.array) -> mx.array:
    return 1 / (2 + mx.expm1(-x))


@_fused
def _exact_softplus(x: mx.array) -> mx.array:
    size = mx.abs(x)
    far = size > _LARGEST
    below = 1 / (1 + mx.expm1(mx.where(far, 0, size)))
    return mx.maximum(x, 0) + mx.log1p(mx.where(far, 0, below))


@_fused
def _exact_gated(x: mx.array, z: mx.array) -> mx.array:
    return x / (2 + mx.expm1(-z))


@_fused
def _exact_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return gate / (2 + mx.expm1(-gate)) * x


@_fused
def _mlx_gated(x: mx.array, z: mx.array) -> mx.array:
    return x * mx.sigmoid(z)


@_fused
def _mlx_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * x
