"""What only an Apple GPU can show: each kernel, as Apple's compiler makes it, against the truth.

Skipped elsewhere. The rest of the suite computes on the CPU on every machine.
"""

import mlx.core as mx
import numpy as np
import pytest
from helpers.tiny import difference, tiny_model, tokens
from tolerances import CHUNK_OVER_SEQUENTIAL, LAYER_FLOAT32

from mlx_kda import doctor, kda
from mlx_kda.layers import KimiDeltaAttention, MoE
from mlx_kda.ops import reference64 as oracle

RUNNER = "metal"
pytestmark = pytest.mark.skipif(not mx.metal.is_available(), reason="no Apple GPU")


@pytest.fixture(autouse=True)
def on_the_gpu():
    before = mx.default_device()
    mx.set_default_device(mx.gpu)
    yield
    mx.set_default_device(before)


@pytest.mark.parametrize("row", oracle.ROWS)
@pytest.mark.parametrize("path", ["kda_recurrent", "kda_chunk"])
def test_the_op_meets_the_bar(path, row):
    x = oracle.make(row, H=1, Hv=2, Dk=128, Dv=64).with_state()
    truth = oracle.recurrence(*x.arrays(), state=x.state)
    loop = oracle.recurrence(*x.arrays(), state=x.state, dtype=np.float32)
    arrays = [mx.array(a) for a in x.arrays()]
    got = kda(*arrays, state=mx.array(x.state), path=path, runner=RUNNER)
    for mine, exact, sequential in zip(got, truth, loop, strict=True):
        bar = CHUNK_OVER_SEQUENTIAL * oracle.error(sequential, exact)
        assert oracle.error(np.array(mine), exact) < bar


@pytest.mark.parametrize("dtype", list(doctor.BOUNDS))
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("sizes", [(2, 128, 2, 128), (1, 64, 2, 32), (1, 256, 1, 256)])
def test_the_kernels_of_a_layer_pass_the_self_check(dtype, bound, sizes):
    H, Dk, Hv, Dv = sizes
    layer = KimiDeltaAttention(
        32, H, Dk, conv_kernel=4, norm_eps=1e-5, lower_bound=bound, num_v_heads=Hv, v_head_dim=Dv
    ).eval()
    layer.dt_bias = mx.random.uniform(-4, 1, layer.dt_bias.shape)
    verdicts = list(doctor.check(layer, dtype, RUNNER))
    assert {v.kernel for v in verdicts} == {"kda_decode", "kda_recurrent", "kda_chunk"}
    assert all(v.ok for v in verdicts), [doctor.describe(v) for v in verdicts]


def test_the_router_passes_the_self_check():
    moe = MoE(32, 32, 256, top_k=8, groups=8, kept_groups=4, scale=2.446).eval()
    moe.e_score_correction_bias = mx.random.uniform(6.8, 7.1, (256,))
    verdict = doctor.check_router(moe, RUNNER)
    assert verdict.kernel == "moe_route" and verdict.ok, doctor.describe(verdict)


@pytest.mark.parametrize("T", [1, 12, 40])
def test_a_model_gives_the_logits_of_its_operations(T):
    model, ids = tiny_model(), tokens(T)
    expected = model(ids)
    model.runner = RUNNER
    assert difference(model(ids), expected) < LAYER_FLOAT32
