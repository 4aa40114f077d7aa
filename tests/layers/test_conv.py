"""The short convolution: any number of conv_kernel, any split, ragged rows."""

import mlx.core as mx
import numpy as np
import pytest
from tolerances import LAYER_FLOAT32 as FLOAT32

from mlx_kda.layers import Padding, ShortConv

C = 6


def oracle(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """silu(causal depthwise convolution) of one row, float64: x [T, C], w [C, conv_kernel]."""
    conv_kernel = w.shape[1]
    y = np.zeros_like(x, dtype=np.float64)
    for t in range(x.shape[0]):
        for i in range(conv_kernel):
            if t - conv_kernel + 1 + i >= 0:
                y[t] += w[:, i].astype(np.float64) * x[t - conv_kernel + 1 + i]
    return y / (1 + np.exp(-y))


def make(conv_kernel: int, T: int, B: int = 1, seed: int = 0):
    rng = np.random.default_rng(seed)
    conv = ShortConv(C, conv_kernel)
    w = rng.standard_normal((C, conv_kernel)).astype(np.float32)
    conv.conv.weight = mx.array(w)[..., None]
    return conv, w, rng.standard_normal((B, T, C)).astype(np.float32)


@pytest.mark.parametrize("conv_kernel", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("T", [0, 1, 2, 3, 4, 5, 8, 20])
def test_any_length_in_one_go_and_token_by_token(conv_kernel, T):
    """Sequences shorter than the window, a kernel of one, no token at all."""
    conv, w, x = make(conv_kernel, T)
    if T == 0:
        window = mx.ones((1, conv_kernel - 1, C))
        y, after = conv(mx.zeros((1, 0, C)), window)
        assert y.shape == (1, 0, C)
        assert mx.array_equal(after, window)
        return
    want = oracle(x[0], w)
    y, window = conv(mx.array(x))
    assert window.shape == (1, conv_kernel - 1, C)
    np.testing.assert_allclose(y[0], want, atol=FLOAT32)
    window, steps = None, []
    for t in range(T):
        y, window = conv(mx.array(x[:, t : t + 1]), window)
        steps.append(y)
    np.testing.assert_allclose(mx.concatenate(steps, axis=1)[0], want, atol=FLOAT32)


class Ragged:
    """What Padding reads of an ArraysCache."""

    def __init__(self, lengths=None, left_padding=None):
        self.lengths = None if lengths is None else mx.array(lengths)
        self.left_padding = None if left_padding is None else mx.array(left_padding)


@pytest.mark.parametrize("conv_kernel", [1, 2, 4])
@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_a_ragged_rows_window_ends_at_its_last_token(conv_kernel, poison):
    """Rows of 0, 1, 2, 5 and 6 tokens, what follows them poisoned."""
    lengths = [0, 1, 2, 5, 6]
    conv, w, x = make(conv_kernel, 6, B=5)
    for b, n in enumerate(lengths):
        x[b, n:] = poison
    old = np.random.default_rng(1).standard_normal((5, conv_kernel - 1, C)).astype(np.float32)
    y, window = conv(mx.array(x), mx.array(old), Padding.of(Ragged(lengths), 6, conv_kernel))
    for b, n in enumerate(lengths):
        row = np.concatenate([old[b], x[b, :n]])
        np.testing.assert_allclose(y[b, :n], oracle(row, w)[conv_kernel - 1 :], atol=FLOAT32)
        np.testing.assert_array_equal(window[b], row[n:])


def test_padding_follows_the_cache():
    assert Padding.of(None, 4, 4) is None
    assert Padding.of(Ragged(), 4, 4) is None
    # after `advance` a length may be past or before the tokens at hand
    padding = Padding.of(Ragged([-3, 2, 9]), 4, 4)
    assert padding.lengths.tolist() == [0, 2, 4]
    assert padding.real is None
    padding = Padding.of(Ragged(left_padding=[-1, 0, 2]), 3, 4)
    assert padding.real[..., 0].tolist() == [[True] * 3, [True] * 3, [False, False, True]]
    assert padding.lengths is None and padding.window is None


def test_a_float32_weight_does_not_widen_the_activations():
    conv, _, x = make(4, 5)
    for dtype in (mx.float16, mx.bfloat16):
        y, window = conv(mx.array(x).astype(dtype))
        assert y.dtype == dtype and window.dtype == dtype


def test_a_long_prompt_is_not_kept_alive_by_its_window():
    conv, _, x = make(4, 512)
    _, window = conv(mx.array(x))
    mx.eval(window)
    # 3 rows of storage behind the window, not 515
    assert window.nbytes == 3 * C * 4
    assert np.array(window, copy=False).base is not None
    y, next_window = conv(mx.array(x[:, :1]), window)
    mx.eval(y, next_window)
    assert next_window.shape == (1, 3, C)
