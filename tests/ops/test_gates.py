"""Gates and norms in front of the recurrence, in float64's light."""

import mlx.core as mx
import numpy as np
import pytest
from tolerances import OP_FLOAT32

from mlx_kda.ops import bounded_gate, l2norm, softplus_gate
from mlx_kda.ops import reference64 as oracle

H, Dk = 3, 16


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("shape", [(H, Dk), (H * Dk,)])
def test_dt_bias_is_per_channel(lower_bound, shape):
    """A bias per head is 0.6 to 0.9 wrong; [H, Dk] and flat [H * Dk] are the same."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((2, 5, H, Dk)).astype(np.float32)
    A_log = rng.uniform(0, 2, H).astype(np.float32)
    dt_bias = rng.uniform(-6, 2, (H, Dk)).astype(np.float32)
    arrays = mx.array(a), mx.array(A_log), mx.array(dt_bias).reshape(shape)
    raw = a.astype(np.float64) + dt_bias
    rate = np.exp(A_log.astype(np.float64)).reshape(-1, 1)
    if lower_bound is None:
        got, truth = softplus_gate(*arrays), -rate * np.logaddexp(raw, 0)
    else:
        got, truth = bounded_gate(*arrays, lower_bound), lower_bound / (1 + np.exp(-rate * raw))
    assert got.dtype == mx.float32
    assert oracle.error(np.array(got), truth) < OP_FLOAT32


@pytest.mark.parametrize("gate", [softplus_gate, lambda *x: bounded_gate(*x, -5.0)])
@pytest.mark.parametrize(
    "A_log,dt_bias,message",
    [
        *(((H,), shape, "dt_bias .*got shape") for shape in ((H,), (Dk,), (H, 1), (Dk, H), ())),
        *((shape, (H * Dk,), "A_log .*got shape") for shape in ((Dk,), (2,), (3, 3), ())),
    ],
)
def test_parameters_of_another_size_are_refused(gate, A_log, dt_bias, message):
    with pytest.raises(ValueError, match=message):
        gate(mx.zeros((1, 2, H, Dk)), mx.zeros(A_log), mx.zeros(dt_bias))


def test_a_bound_must_be_negative():
    with pytest.raises(ValueError, match="lower_bound must be negative"):
        bounded_gate(mx.zeros((1, 1, 1, 4)), mx.zeros((1,)), mx.zeros((4,)), 5.0)


@pytest.mark.parametrize("amplitude", [1, 0.1, 1e-2, 1e-3, 1e-4, 0])
def test_l2norm_adds_eps_to_the_sum(amplitude):
    """eps on the mean is 0.87 off at amplitude 1e-4; a row of zeros stays zero."""
    x = amplitude * np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    x64 = x.astype(np.float64)
    truth = x64 / np.sqrt((x64**2).sum(-1, keepdims=True) + 1e-6)
    got = np.array(l2norm(mx.array(x)))
    assert np.isfinite(got).all()
    assert np.abs(got - truth).max() <= 1e-5 * max(np.abs(truth).max(), 1e-30)
