"""Gates and write strengths that the prefill kernels compute themselves."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import layer64
from helpers.kernels import OPS, f32, gate_of, numpy, rounded
from tolerances import OP_FLOAT32, ROUNDED_ONCE

from mlx_kda.ops import reference64 as oracle
from mlx_kda.ops.gates import Gate


def raw_call(name, layer, runner="emulator", dtype="float32", **options):
    """A layer's raw gate and beta through a prefill kernel: (o, S), and the oracle's."""
    q, k, v = layer.mixed()
    kind = getattr(mx, dtype)
    arrays = [f32(x).astype(kind) for x in (q, k, v, layer.a, layer.b)]
    o, S = OPS[name](
        *arrays,
        state=f32(layer.state),
        gate=gate_of(layer),
        beta_kind=layer.beta_kind,
        runner=runner,
        **options,
    )
    q, k, v = (numpy(x).astype(np.float64) for x in arrays[:3])
    truth = oracle.recurrence(q, k, v, layer.gate(), layer.beta(), state=layer.state)
    return (numpy(o), numpy(S)), truth


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("beta_kind", ["sigmoid", "twice"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_raw_gates_are_per_channel(name, lower_bound, beta_kind):
    """Both gates and both betas inside the kernel, dt_bias ~ U(-6, 2) per channel."""
    layer = layer64.make(T=37, H=2, Hv=4, lower_bound=lower_bound, beta_kind=beta_kind)
    for got, truth in zip(*raw_call(name, layer), strict=True):
        assert oracle.error(got, truth) < OP_FLOAT32


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_raw_gates_in_16_bits(name, dtype):
    """a and b in the activations' dtype, A_log and dt_bias in float32."""
    layer = layer64.make(T=20, rounded=rounded(dtype))
    (o, S), truth = raw_call(name, layer, dtype=dtype)
    assert oracle.error(S, truth[1]) < OP_FLOAT32
    assert oracle.error(o, truth[0]) < ROUNDED_ONCE * oracle.error(
        rounded(dtype)(truth[0]), truth[0]
    )


@pytest.mark.parametrize("name", OPS)
def test_zero_parameters(name):
    """A_log = a = dt_bias = 0 leaves exp(-0.6931), or exp(-2.5) with the bound -5."""
    zero = mx.zeros((1, 1, 2, 32))
    for bound, g in ((None, -np.log(2)), (-5.0, -2.5)):
        gates = Gate(mx.zeros((2,)), mx.zeros((64,)), bound)
        _, S = OPS[name](
            *(zero, zero, zero, zero, mx.zeros((1, 1, 2))),
            state=mx.ones((1, 2, 32, 32)),
            gate=gates,
            runner="emulator",
        )
        assert np.allclose(numpy(S), np.exp(g), rtol=1e-6, atol=0)


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
