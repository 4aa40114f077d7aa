"""Every head dimension, dtype, gate, kind of beta and operand type of the prefill kernels.

A covering set, not the product: each value of each choice appears, in the checked emulator.
"""

import mlx.core as mx
import numpy as np
import pytest
from helpers import layer64
from helpers.kernels import OPS, f32, gate_of, numpy, rounded
from tolerances import CHUNK_OVER_SEQUENTIAL, HALF_OVER_ROUNDING, OP_FLOAT32, ROUNDED_ONCE

from mlx_kda.kernels.arguments import DIMS
from mlx_kda.ops import reference64 as oracle

DTYPES = ("bfloat16", "float16", "float32")
GATES = ("softplus", "bounded", "channel", "head", "none")
BETAS = ("sigmoid", "twice", "given")
# (Dk, Dv, dtype, gate, beta): Dk and Dv run over all sizes, differently.
COVER = [
    (Dk, DIMS[(3 * i + 2) % len(DIMS)], DTYPES[i % 3], GATES[i % 5], BETAS[(i + i // 3) % 3])
    for i, Dk in enumerate(DIMS)
]


def test_the_cover_covers():
    for column, values in enumerate((DIMS, DIMS, DTYPES, GATES, BETAS)):
        assert {row[column] for row in COVER} == set(values)


@pytest.mark.parametrize("mode", ["recurrent", "exact", "half"])
@pytest.mark.parametrize("Dk,Dv,dtype,gate,beta_kind", COVER)
def test_every_size_and_law(mode, Dk, Dv, dtype, gate, beta_kind):
    if mode == "half" and dtype == "float32":
        dtype = "float16"
    layer = layer64.make(
        T=19,
        H=1,
        Hv=2,
        Dk=Dk,
        Dv=Dv,
        lower_bound=-5.0 if gate == "bounded" else None,
        beta_kind="sigmoid" if beta_kind == "given" else beta_kind,
        rounded=rounded(dtype),
        seed=Dk,
    )
    lengths = [19, 12]
    kind = getattr(mx, dtype)
    q, k, v = (f32(x).astype(kind) for x in layer.mixed())
    g = {"channel": layer.gate(), "head": layer.gate()[..., 0], "none": None}.get(gate, layer.a)
    raw = gate in ("softplus", "bounded")
    beta = layer.beta() if beta_kind == "given" else layer.b
    options = {} if mode == "recurrent" else {"mode": mode}
    o, S = OPS["recurrent" if mode == "recurrent" else "chunk"](
        *(q, k, v, None if g is None else f32(g).astype(kind if raw else mx.float32)),
        f32(beta).astype(mx.float32 if beta_kind == "given" else kind),
        state=f32(layer.state),
        gate=gate_of(layer) if raw else None,
        beta_kind=beta_kind,
        lengths=mx.array(lengths),
        runner="emulator",
        **options,
    )
    rounded_qkv = [numpy(x).astype(np.float64) for x in (q, k, v)]
    inputs = (*rounded_qkv, layer.gate() if raw else g, layer.beta())
    truth = oracle.recurrence(*inputs, state=layer.state, lengths=lengths)
    rounding = oracle.error(rounded(dtype)(truth[0]), truth[0])
    if mode == "half":
        assert oracle.error(numpy(o), truth[0]) < HALF_OVER_ROUNDING * rounding
        assert oracle.error(numpy(S), truth[1]) < 1e-3
        return
    in_order = oracle.recurrence(*inputs, state=layer.state, lengths=lengths, dtype=np.float32)
    bar = CHUNK_OVER_SEQUENTIAL * oracle.error(in_order[1], truth[1])
    assert oracle.error(numpy(S), truth[1]) < max(bar, OP_FLOAT32 / 10)
    assert oracle.error(numpy(o), truth[0]) < ROUNDED_ONCE * rounding + OP_FLOAT32
