"""What the kernels ask of a GPU, counted in the emulator at Dk = Dv = 128, against the targets.

Cycles are a model of one GPU core (`mlx_kda.kernels.counts`), not a measurement.
"""

import mlx.core as mx
import pytest
from helpers import layer64, oracle
from helpers.kernels import as_dtype, memory, rounded, run, step
from helpers.shipped import mlx_lm_gated_delta

from mlx_kda.kernels import metal_kernel
from mlx_kda.kernels.counts import Counts, counting

T, D = 64, 128
DTYPES = ("float32", "bfloat16")


def counted(call):
    """{kernel: Counts} of a call with runner="emulator-count"."""
    with counting() as log:
        call()
    total = {}
    for name, counts in log:
        total[name] = total.get(name, Counts()) + counts
    return total


@pytest.fixture(scope="module", params=DTYPES)
def inputs(request):
    return as_dtype(oracle.make("random", T=T, H=1, Dk=D, Dv=D), request.param), request.param


@pytest.fixture(scope="module")
def vector(inputs):
    """mlx-lm's kernel for per-channel gates, a token-head."""
    x, dtype = inputs
    kernels = mlx_lm_gated_delta(lambda **a: metal_kernel(**a, runner="emulator-count"))
    kind = getattr(mx, dtype)
    q, k, v, beta = (mx.array(a).astype(kind) for a in (x.q, x.k, x.v, x.beta))
    counts = counted(
        lambda: kernels["gated_delta_step_vec"](
            inputs=[q, k, v, mx.exp(mx.array(x.g)), beta, mx.zeros((1, 1, D, D)), T],
            template=[
                *(("InT", kind), ("StT", mx.float32)),
                *(("Dk", D), ("Dv", D), ("Hk", 1), ("Hv", 1)),
            ],
            grid=(32, D, 1),
            threadgroup=(32, 4, 1),
            output_shapes=[v.shape, (1, 1, D, D)],
            output_dtypes=[kind, mx.float32],
        )
    )
    return counts["gated_delta_step_vec"].per(T)


def prefill(inputs, name="chunk", **options):
    x, dtype = inputs
    counts = counted(lambda: run(name, x, dtype, runner="emulator-count", **options))
    return {kernel: c.per(T) for kernel, c in counts.items()}


@pytest.mark.parametrize("mode", ["exact", "half"])
def test_prefill_meets_its_targets(inputs, vector, mode):
    """Scan: 105 products per 16 tokens and 8 columns. Both: 1/8 of the bytes, 1/4 of the cycles."""
    if mode == "half" and inputs[1] == "float32":
        return
    counts = prefill(inputs, mode=mode)
    prepare, scan = counts["kda_chunk_prepare"], counts["kda_chunk_scan"]
    assert scan.mma * 16 / (D / 8) == 105 <= 110
    both = prepare + scan
    assert both.device_bytes <= vector.device_bytes / 8
    assert both.alu_cycles <= 560
    assert both.cycles_serial <= 800
    assert both.cycles_serial <= vector.cycles_serial / 4
    assert scan.simd_sums == scan.shuffles == prepare.simd_sums == prepare.shuffles == 0


def test_the_recurrent_kernel_stays_cheap_too(inputs, vector):
    """64 shuffles instead of 256 SIMD-wide sums; q, k and g read once for 32 rows."""
    counts = prefill(inputs, "recurrent")["kda_recurrent"]
    assert counts.simd_sums == 0 and counts.shuffles == 64
    assert counts.device_bytes <= vector.device_bytes / 8
    assert counts.cycles_serial <= vector.cycles_serial / 4


def test_decode_moves_the_state_and_little_else():
    """One head, one token, 16-bit activations: at most 1.1 x reading and writing the state."""
    layer = layer64.make(B=1, T=1, H=1, Dk=D, Dv=D, rounded=rounded("bfloat16"))
    counts = counted(
        lambda: step(layer, memory(layer, "bfloat16"), dtype="bfloat16", runner="emulator-count")
    )["kda_decode"]
    state = 2 * 4 * D * D
    assert counts.unique_read + counts.unique_written <= 1.1 * state
    assert counts.device_bytes <= 1.15 * state
