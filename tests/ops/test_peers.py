"""The op against code that is not ours: MLX's own gated delta update and mlx-lm's loop."""

import mlx.core as mx
import numpy as np
import pytest
from tolerances import OP_FLOAT32

from mlx_kda.attention import kda
from mlx_kda.ops import reference64 as oracle

PATHS = ("reference", "step", "chunk")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ["random", "collinear"])
def test_per_channel_gate_against_mlx_lm(path, row):
    gated_delta = pytest.importorskip("mlx_lm.models.gated_delta")
    x = oracle.make(row, T=70, B=2, H=2, Hv=4, Dk=32, Dv=48).with_state()
    q, k, v, g, beta = (mx.array(a) for a in x.arrays())
    S = mx.array(x.state)
    o, S_out = kda(q, k, v, g, beta, state=S, path=path)
    want, S_want = gated_delta.gated_delta_ops(q * 32**-0.5, k, v, mx.exp(g), beta, S)
    assert oracle.error(np.array(o), np.array(want)) < OP_FLOAT32
    assert oracle.error(np.array(S_out), np.array(S_want)) < OP_FLOAT32


@pytest.mark.parametrize("path", PATHS)
def test_per_head_gate_against_mlx(path):
    """mx.fast.gated_delta_update takes a scalar gate, linear: equal channels must agree with it."""
    x = oracle.make("collinear", T=70, B=2, H=2, Hv=4, Dk=64, Dv=64).with_state()
    q, k, v, g, beta = (mx.array(a) for a in x.arrays())
    g, S = g[..., 0], mx.array(x.state)
    want, S_want = mx.fast.gated_delta_update(q * 64**-0.5, k, v, mx.exp(g), beta, S)
    for gate in (g, mx.broadcast_to(g[..., None], (*g.shape, 64))):
        o, S_out = kda(q, k, v, gate, beta, state=S, path=path)
        assert oracle.error(np.array(o), np.array(want)) < OP_FLOAT32
        assert oracle.error(np.array(S_out), np.array(S_want)) < OP_FLOAT32
