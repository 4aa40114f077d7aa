"""Gates and write strengths that the prefill kernels compute themselves."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import layer64
from helpers.kernels import OPS, f32, gate_of, numpy
from tolerances import OP_FLOAT32

from mlx_kda.ops import reference64 as oracle
from mlx_kda.ops.gates import Gate


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("beta_kind", ["sigmoid", "twice"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_raw_gates_are_per_channel(name, lower_bound, beta_kind):
    """Both gates and both betas in the kernel, dt_bias ~ U(-6, 2) per channel."""
    layer = layer64.make(T=37, H=2, Hv=4, lower_bound=lower_bound, beta_kind=beta_kind)
    qkv = [f32(x) for x in layer.mixed()]
    got = OPS[name](
        *(*qkv, f32(layer.a), f32(layer.b)),
        state=f32(layer.state),
        gate=gate_of(layer),
        beta_kind=layer.beta_kind,
        runner="emulator",
    )
    rounded_qkv = (numpy(x).astype(np.float64) for x in qkv)
    truth = oracle.recurrence(*rounded_qkv, layer.gate(), layer.beta(), state=layer.state)
    for x, t in zip(got, truth, strict=True):
        assert oracle.error(numpy(x), t) < OP_FLOAT32


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("a,dt_bias", [(-20.0, 0.0), (0.0, -20.0), (-80.0, 0.0), (60.0, 0.0)])
def test_softplus_at_its_ends(name, a, dt_bias):
    """softplus(-20) is 2e-9, not 0; softplus(60) is 60, not infinity.

    A softplus of 0 would leave a state 8e-4 too large.
    """
    shape = (1, 1024, 1, 32)
    zero = mx.zeros(shape)
    gates = Gate(mx.full((1,), 6.0), mx.full((32,), dt_bias))
    state = mx.ones((1, 1, 32, 32))
    _, S = OPS[name](
        *(zero, zero, zero, mx.full(shape, a), mx.zeros((1, 1024, 1))),
        state=state,
        gate=gates,
        runner="emulator-fast",
    )
    g = -np.exp(6.0) * np.logaddexp(a + dt_bias, 0)
    assert np.abs(numpy(S) - np.exp(1024 * g)).max() < 1e-4


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    "A_log,dt_bias,g,message",
    [
        ((2,), (2,), (1, 3, 2, 32), "dt_bias must hold one value per channel.*got shape"),
        ((2,), (32,), (1, 3, 2, 32), "dt_bias must hold"),
        ((2,), (32, 2), (1, 3, 2, 32), "dt_bias must hold"),
        ((32,), (64,), (1, 3, 2, 32), "A_log must hold one value per head.*got shape"),
        ((), (64,), (1, 3, 2, 32), "A_log must hold"),
        ((2,), (64,), (1, 3, 2), "raw gate must be.*got shape"),
    ],
)
def test_wrong_gate_parameters_are_named(name, A_log, dt_bias, g, message):
    """dt_bias [H] or [Dk], A_log [Dk], a raw gate [B, T, H]."""
    x = mx.zeros((1, 3, 2, 32))
    with pytest.raises(ValueError, match=message):
        OPS[name](
            *(x, x, x, mx.zeros(g), mx.zeros((1, 3, 2))),
            gate=Gate(mx.zeros(A_log), mx.zeros(dt_bias)),
            runner="emulator-fast",
        )
