"""kda_recurrent and the chunked pair against the float64 oracle, on the inputs that hide mistakes.

Everything runs in the checked emulator, which also reports races, stray accesses and divergence.
"""

import mlx.core as mx
import numpy as np
import pytest
from helpers.kernels import as_dtype, f32, numpy, rounded, run
from tolerances import (
    CHUNK_OVER_SEQUENTIAL,
    HALF_OVER_ROUNDING,
    HALF_STATE,
    OP_FLOAT32,
    ROUNDED_ONCE,
)

from mlx_kda.kernels.arguments import floats, in_device_memory, integers
from mlx_kda.kernels.sources import kernel
from mlx_kda.ops import reference64 as oracle

KERNELS = ("recurrent", "chunk")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("from_state", [False, True])
@pytest.mark.parametrize("row", oracle.ROWS)
def test_the_bar(kernel, row, from_state):
    """At most 5 x the error of a sequential float32 loop, for output and final state."""
    x = oracle.make(row, H=1)
    x = x.with_state() if from_state else x
    truth = oracle.recurrence(*x.arrays(), state=x.state)
    sequential = oracle.recurrence(*x.arrays(), state=x.state, dtype=np.float32)
    for name, got, seq, t in zip("oS", run(kernel, x), sequential, truth, strict=True):
        assert oracle.error(got, t) <= CHUNK_OVER_SEQUENTIAL * oracle.error(seq, t), name


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("Dk,Dv", [(32, 128), (96, 64), (256, 32)])
@pytest.mark.parametrize("row", oracle.CORRELATED)
def test_the_bar_where_dk_is_not_dv(kernel, row, Dk, Dv):
    x = oracle.make(row, T=150, H=1, Dk=Dk, Dv=Dv, seed=3)
    truth = oracle.recurrence(*x.arrays())
    sequential = oracle.recurrence(*x.arrays(), dtype=np.float32)
    for name, got, seq, t in zip("oS", run(kernel, x), sequential, truth, strict=True):
        assert oracle.error(got, t) <= CHUNK_OVER_SEQUENTIAL * oracle.error(seq, t), name


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("row", oracle.ROWS)
def test_16_bit_activations_cost_one_rounding_of_the_output(kernel, dtype, row):
    """Against the oracle on the same rounded inputs: the state stays exact."""
    x = as_dtype(oracle.make(row, T=130, H=1, Dk=64, Dv=32), dtype).with_state()
    o, S = oracle.recurrence(*x.arrays(), state=x.state)
    got = run(kernel, x, dtype)
    assert oracle.error(got[0], o) < ROUNDED_ONCE * oracle.error(rounded(dtype)(o), o)
    sequential = oracle.recurrence(*x.arrays(), state=x.state, dtype=np.float32)[1]
    assert oracle.error(got[1], S) <= CHUNK_OVER_SEQUENTIAL * oracle.error(sequential, S)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("row", oracle.ROWS)
def test_half_mode(row, dtype):
    """float16 K~ and Q~: twice the rounding of the output, on correlated keys too."""
    x = as_dtype(oracle.make(row, H=1), dtype)
    o, S = oracle.recurrence(*x.arrays())
    got = run("chunk", x, dtype, mode="half")
    assert oracle.error(got[0], o) <= HALF_OVER_ROUNDING * oracle.error(rounded(dtype)(o), o)
    assert oracle.error(got[1], S) <= HALF_STATE


@pytest.mark.parametrize("row", oracle.CORRELATED)
def test_half_mode_does_not_drift(row):
    """4,096 tokens: rounding that entered the state (a half K^, say) would grow as sqrt(T)."""
    x = as_dtype(oracle.make(row, T=4096, H=1, Dk=64, Dv=32), "float16")
    o, S = oracle.recurrence(*x.arrays())
    got = run("chunk", x, "float16", mode="half", runner="emulator-fast")
    assert oracle.error(got[0], o) <= HALF_OVER_ROUNDING * oracle.error(rounded("float16")(o), o)
    assert oracle.error(got[1], S) <= HALF_STATE


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("delta_rule", [True, False])
@pytest.mark.parametrize("gate", ["channel", "head", "none"])
@pytest.mark.parametrize("heads", [(2, 2), (1, 3)])
def test_the_lineage(kernel, delta_rule, gate, heads):
    """KDA, Gated DeltaNet, DeltaNet, linear attention; Hv > H, Dk != Dv, B = 2, from a state."""
    H, Hv = heads
    x = oracle.make("collinear", T=45, B=2, H=H, Hv=Hv, Dk=64, Dv=32).with_state()
    g = {"channel": x.g, "head": x.g[..., 0], "none": None}[gate]
    x = oracle.Inputs(x.q, x.k, x.v, g, x.beta, x.state)
    truth = oracle.recurrence(*x.arrays(), state=x.state, delta_rule=delta_rule)
    for got, t in zip(run(kernel, x, delta_rule=delta_rule), truth, strict=True):
        assert oracle.error(got, t) < OP_FLOAT32


def prepared(row, T=16):
    """T and M of one chunk: ((kernel's, float64's), (kernel's, float64's)), each 16 x 16."""
    x = oracle.make(row, T=T, H=1, Dk=128)
    q, k, g, beta = (a[0, :, 0].astype(np.float64) for a in (x.q, x.k, x.g, x.beta))
    N, M = np.zeros((16, 16)), np.zeros((16, 16))
    for i in range(T):
        for j in range(i + 1):
            r = np.exp(g[j + 1 : i + 1].sum(axis=0))
            N[i, j] = (k[i] * k[j] * r).sum() * (i > j)
            M[i, j] = (q[i] * k[j] * r).sum()
    _, _, tri, _ = kernel("kda_chunk_prepare", "emulator")(
        inputs=[
            *(f32(x.q), f32(x.k), f32(x.g), *in_device_memory(None, None), f32(x.beta)),
            *(integers((T,) * 8), integers((T, 1, 1, 0, 1)), floats((1.0, 0.0))),
        ],
        template=[("OpT", mx.float32), ("Dk", 128), ("GATE", 2), ("BETA", 0), ("DELTA_RULE", True)],
        grid=(128, 1, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(1, 1, 4096), (1, 1, 2048), (1, 1, 384), (1, 1, 128)],
        output_dtypes=[mx.float32] * 4,
    )
    tiles = numpy(tri).reshape(6, 8, 8)
    full = [np.block([[t[0], np.zeros((8, 8))], [t[1], t[2]]]) for t in (tiles[:3], tiles[3:])]
    solve = np.linalg.inv(np.eye(16) + beta[:, None] * N) * beta
    return (full[0], solve), (full[1], M)


@pytest.mark.parametrize("row", oracle.ROWS)
def test_b2_inverse_is_scored_below_the_diagonal(row):
    """Case B2: the unit diagonal dominates the matrix and hides a wrong inverse."""
    for got, truth in prepared(row):
        lower = np.tril(np.ones((16, 16)), -1) > 0
        scale = max(np.abs(truth[lower]).max(), 1e-3)
        assert np.abs(got - truth)[lower].max() < 2e-6 * scale
        assert np.abs(np.diag(got - truth)).max() < 1e-6
        assert not np.triu(got, 1).any()
