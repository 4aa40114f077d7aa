"""exp and its kin, short and long: closer to the truth than MLX's own, and the same at the ends."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from memory import resident

from mlx_kda.ops import elementwise

SHORT, LENGTH = 100, 1 << 14
OWN = {"exp": mx.exp, "sigmoid": mx.sigmoid, "softplus": nn.softplus, "silu": nn.silu}
TRUTH = {
    "exp": np.exp,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("name", TRUTH)
@pytest.mark.parametrize("width", [1e-4, 1.0, 20.0, 80.0])
@pytest.mark.parametrize("length", [SHORT, LENGTH])
def test_every_value_is_right_to_float32(name, width, length):
    """Small gates are where a decay is lost, large ones where a sigmoid saturates."""
    x = np.linspace(-width, width, length).astype(np.float32)
    got = np.array(getattr(elementwise, name)(mx.array(x)), dtype=np.float64)
    truth = TRUTH[name](x.astype(np.float64))
    assert np.abs(got - truth).max() <= 5e-7 * np.abs(truth).max()
    ok = truth != 0
    assert np.abs(got[ok] / truth[ok] - 1).max() < 5e-7


@pytest.mark.parametrize("name", TRUTH)
@pytest.mark.parametrize("length", [SHORT, LENGTH])
def test_the_ends_are_those_of_mlx(name, length):
    ends = [-np.inf, -1e30, -200.0, -0.0, 0.0, 200.0, 1e30, np.inf, np.nan]
    x = np.zeros(length, dtype=np.float32)
    x[: len(ends)] = ends
    got = np.array(getattr(elementwise, name)(mx.array(x)))[: len(ends)]
    assert np.array_equal(got, np.array(OWN[name](mx.array(x[: len(ends)]))), equal_nan=True)


def test_a_decay_of_exactly_nothing_is_one():
    """exp(0) = 1 and exp(-1e-7) < 1, or the state would drift on a zero token."""
    for length in (SHORT, LENGTH):
        x = mx.zeros((length,))
        assert mx.array_equal(elementwise.exp(x), mx.ones_like(x))
        assert mx.all(elementwise.exp(x - 1e-7) < 1)


@pytest.mark.parametrize("name", TRUTH)
@pytest.mark.parametrize("width", [1e-4, 4.0, 18.0])
def test_a_sequence_split_elsewhere_gives_the_same_values(name, width):
    """Decoding takes the short form for one token, a prefill the long one for thousands."""
    x = mx.random.normal((LENGTH,), key=mx.random.key(0)) * width
    function = getattr(elementwise, name)
    long, short = function(x), mx.concatenate([function(part) for part in mx.split(x, 64)])
    assert mx.all(mx.abs(long - short) <= 5e-7 * mx.abs(long))


@pytest.mark.parametrize("name", TRUTH)
@pytest.mark.parametrize("length", [SHORT, LENGTH])
def test_the_gradient_is_that_of_the_function(name, length):
    x = mx.random.normal((length,), key=mx.random.key(0)) * 4
    quick = mx.grad(lambda x: getattr(elementwise, name)(x).sum())(x)
    own = mx.grad(lambda x: OWN[name](x).sum())(x)
    assert mx.abs(quick - own).max() < 4e-6 * mx.abs(own).max()


@pytest.mark.parametrize("shape", [(3, 4), (4, 64, 64)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_gates_of_every_length_and_dtype(shape, dtype):
    a, b = (mx.random.normal(shape, key=mx.random.key(i)).astype(dtype) for i in (0, 1))
    for got, want in (
        (elementwise.gated(a, b), a * mx.sigmoid(b)),
        (elementwise.swiglu(a, b), a * mx.sigmoid(a) * b),
    ):
        assert got.dtype == dtype
        bound = 1e-6 if dtype == mx.float32 else 2e-2
        assert mx.abs((got - want).astype(mx.float32)).max() < bound * 4


def test_new_lengths_keep_no_memory():
    """MLX never frees what it compiles for one shape: 43 KB for each length of a prompt, once."""

    def run(rows):
        for n in rows:
            mx.eval(elementwise.softplus(mx.ones((n, 256))), elementwise.silu(mx.ones((n, 256))))
        mx.clear_cache()

    run(range(500, 520))
    before = resident()
    run(range(20, 320))
    assert resident() - before < 5e6


@pytest.mark.parametrize("length", [SHORT, LENGTH])
@pytest.mark.parametrize(
    ("name", "at"), [("exp", -100.0), ("softplus", -100.0), ("softplus", 100.0)]
)
def test_the_gradient_is_a_number_where_exp_overflows(name, at, length):
    function = getattr(elementwise, name)
    x = mx.full((length,), at)
    slope = mx.grad(lambda x: function(x).sum())(x)
    assert slope.tolist() == [1.0 if at > 0 else 0.0] * length
