"""The KDA layer against float64 by its definition: both gates, every parameter in its place."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.tiny import difference
from mlx_lm.models.cache import ArraysCache
from tolerances import LAYER_FLOAT32

from mlx_kda.layers import KimiDeltaAttention, Padding
from mlx_kda.ops.reference64 import recurrence

HIDDEN, HEADS, D = 40, 3, 16


def make(
    conv_kernel: int = 4, lower_bound: float | None = None, seed: int = 0
) -> KimiDeltaAttention:
    rng = np.random.default_rng(seed)
    layer = KimiDeltaAttention(HIDDEN, HEADS, D, conv_kernel, 1e-5, lower_bound)
    layer.dt_bias = mx.array(rng.uniform(-4, 1, HEADS * D).astype(np.float32))
    layer.A_log = mx.array(rng.uniform(0, 2, (1, 1, HEADS, 1)).astype(np.float32))
    layer.o_norm.weight = mx.array(rng.uniform(0.5, 1.5, D).astype(np.float32))
    for conv in (layer.q_conv.conv, layer.k_conv.conv, layer.v_conv.conv):
        conv.weight = mx.array(rng.standard_normal(conv.weight.shape).astype(np.float32))
    for name in ("q", "k", "v", "f_a", "f_b", "b", "g_a", "g_b", "o"):
        linear = layer[f"{name}_proj"]
        shape = linear.weight.shape
        w = rng.standard_normal(shape) * shape[1] ** -0.5
        linear.weight = mx.array(w.astype(np.float32))
    return layer


def inputs(T: int, B: int = 1, seed: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal((B, T, HIDDEN)).astype(np.float32))


def oracle(layer: KimiDeltaAttention, x: mx.array):
    """(y [T, hidden], state [H, D, D]) of one row, float64."""
    f64 = lambda a: np.array(a, np.float64)  # noqa: E731
    sigmoid = lambda a: 1 / (1 + np.exp(-a))  # noqa: E731
    x = f64(x[0])
    T = x.shape[0]
    linear = lambda name, a: a @ f64(layer[f"{name}_proj"].weight).T  # noqa: E731

    def convolved(name):
        a, w = linear(name, x), f64(layer[f"{name}_conv"].conv.weight)[..., 0]
        conv_kernel = w.shape[1]
        padded = np.concatenate([np.zeros((conv_kernel - 1, a.shape[1])), a])
        y = sum(padded[i : i + T] * w[:, i] for i in range(conv_kernel))
        return (y * sigmoid(y)).reshape(T, HEADS, D)

    def unit(a):
        return a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6)

    q, k, v = unit(convolved("q")), unit(convolved("k")), convolved("v")
    rate = np.exp(f64(layer.A_log).reshape(HEADS, 1))
    a = (linear("f_b", linear("f_a", x)) + f64(layer.dt_bias)).reshape(T, HEADS, D)
    if layer.lower_bound is None:
        g = -rate * np.logaddexp(0, a)
    else:
        g = layer.lower_bound * sigmoid(rate * a)
    beta = sigmoid(linear("b", x))
    o, state = recurrence(*(z[None] for z in (q, k, v, g, beta)))
    o = o[0] / np.sqrt((o[0] ** 2).mean(-1, keepdims=True) + 1e-5) * f64(layer.o_norm.weight)
    o = o * sigmoid(linear("g_b", linear("g_a", x))).reshape(T, HEADS, D)
    return linear("o", o.reshape(T, -1)), state[0]


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("conv_kernel", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 3, 40])
def test_both_gates_against_float64(lower_bound, conv_kernel, T):
    """Softplus and bounded gates with a dt_bias per channel: output and final state."""
    layer, x = make(conv_kernel, lower_bound), inputs(T)
    want, state = oracle(layer, x)
    cache = ArraysCache(4)
    assert difference(layer(x, cache)[0], want) < LAYER_FLOAT32
    assert difference(cache[3][0], state) < LAYER_FLOAT32
    assert cache[3].dtype == mx.float32
    cache = ArraysCache(4)
    steps = [layer(x[:, t : t + 1], cache) for t in range(T)]
    assert difference(mx.concatenate(steps, axis=1)[0], want) < LAYER_FLOAT32
    assert difference(cache[3][0], state) < LAYER_FLOAT32


@pytest.mark.parametrize("shape", [(HEADS,), (HEADS, 1), (1, 1, HEADS, 1)])
def test_any_shape_of_the_gate_parameters(shape):
    """A_log [H], [H, 1] or [1, 1, H, 1]; dt_bias [H * D] or [H, D]."""
    layer, x = make(), inputs(12)
    want = layer(x)
    layer.A_log = layer.A_log.reshape(shape)
    assert mx.array_equal(layer(x), want)
    layer.dt_bias = layer.dt_bias.reshape(HEADS, D)
    assert mx.array_equal(layer(x), want)
    layer.dt_bias = layer.dt_bias[:, 0]
    with pytest.raises(ValueError, match="dt_bias"):
        layer(x)


def test_rows_that_end_early_leave_nothing_behind():
    """A ragged batch, garbage after each row's end; windows, state and one more step."""
    layer, T = make(), 21
    lengths = [0, 1, 2, 9, 21]
    rows = inputs(T, B=len(lengths))
    poisoned = mx.array(np.array(rows))
    for b, n in enumerate(lengths):
        poisoned[b, n:] = 1e30
    cache = ArraysCache(4)
    cache.prepare(lengths=lengths)
    y = layer(poisoned, cache, Padding.of(cache, T, 4))
    cache.finalize()
    step = inputs(1, B=len(lengths), seed=2)
    y_next = layer(step, cache)
    for b, n in enumerate(lengths):
        alone = ArraysCache(4)
        row = slice(b, b + 1)
        if n:
            want = layer(rows[row, :n], alone)
            assert difference(y[row, :n], want) < LAYER_FLOAT32
        assert difference(y_next[row], layer(step[row], alone)) < LAYER_FLOAT32
        for i in range(4):
            assert difference(cache[i][row], alone[i]) < LAYER_FLOAT32


def test_the_state_is_float32_under_16_bit_activations():
    """Activations and windows in the model's dtype, the state always float32."""
    for dtype in (mx.float16, mx.bfloat16):
        layer, x = make(), inputs(20).astype(dtype)
        keep = {"A_log": layer.A_log, "dt_bias": layer.dt_bias}
        layer.set_dtype(dtype)
        layer.update(keep)
        cache = ArraysCache(4)
        for part in (x[:, :17], x[:, 17:18], x[:, 18:]):
            assert layer(part, cache).dtype == dtype
            assert [cache[i].dtype for i in range(4)] == [dtype] * 3 + [mx.float32]
