"""exp and its kin: closer to the truth than MLX's own, and the same at the ends."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_kda.ops import elementwise

LENGTH = 1 << 14
OWN = {"exp": mx.exp, "sigmoid": mx.sigmoid, "softplus": nn.softplus, "silu": nn.silu}
TRUTH = {
    "exp": np.exp,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("name", TRUTH)
@pytest.mark.parametrize("width", [1e-4, 1.0, 20.0, 80.0])
def test_every_value_is_right_to_float32(name, width):
    """Small gates are where a decay is lost, large ones where a sigmoid saturates."""
    x = np.linspace(-width, width, LENGTH).astype(np.float32)
    got = np.array(getattr(elementwise, name)(mx.array(x)), dtype=np.float64)
    truth = TRUTH[name](x.astype(np.float64))
    assert np.abs(got - truth).max() <= 5e-7 * np.abs(truth).max()
    ok = truth != 0
    assert np.abs(got[ok] / truth[ok] - 1).max() < 5e-7


@pytest.mark.parametrize("name", TRUTH)
def test_the_ends_are_those_of_mlx(name):
    x = mx.array([-np.inf, -1e30, -200.0, -0.0, 0.0, 200.0, 1e30, np.inf, np.nan])
    got = np.array(getattr(elementwise, name)(x))
    assert np.array_equal(got, np.array(OWN[name](x)), equal_nan=True)


def test_a_decay_of_exactly_nothing_is_one():
    """exp(0) = 1 and exp(-1e-7) < 1, or the state would drift on a zero token."""
    x = mx.zeros((LENGTH,))
    assert mx.array_equal(elementwise.exp(x), mx.ones_like(x))
    assert mx.all(elementwise.exp(x - 1e-7) < 1)


@pytest.mark.parametrize("name", TRUTH)
def test_the_gradient_is_that_of_the_function(name):
    x = mx.random.normal((100,), key=mx.random.key(0)) * 4
    exact = mx.grad(lambda x: getattr(elementwise, name)(x).sum())(x)
    own = mx.grad(lambda x: OWN[name](x).sum())(x)
    assert mx.abs(exact - own).max() < 4e-6 * mx.abs(own).max()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_gated_and_swiglu_in_every_dtype(dtype):
    a, b = (mx.random.normal((4, 64, 64), key=mx.random.key(i)).astype(dtype) for i in (0, 1))
    for got, want in (
        (elementwise.gated(a, b), a * mx.sigmoid(b)),
        (elementwise.swiglu(a, b), a * mx.sigmoid(a) * b),
    ):
        assert got.dtype == dtype
        bound = 4e-6 if dtype == mx.float32 else 8e-2
        assert mx.abs((got - want).astype(mx.float32)).max() < bound


@pytest.mark.parametrize(
    ("name", "at"), [("exp", -100.0), ("softplus", -100.0), ("softplus", 100.0)]
)
def test_the_gradient_is_a_number_where_exp_overflows(name, at):
    function = getattr(elementwise, name)
    x = mx.full((8,), at)
    slope = mx.grad(lambda x: function(x).sum())(x)
    assert slope.tolist() == [1.0 if at > 0 else 0.0] * 8
