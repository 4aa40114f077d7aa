"""What the kernels ask of a GPU, counted in the emulator at Dk = Dv = 128, against the targets.

Cycles are a model of one GPU core (`mlx_kda.runners.counters`), not a measurement.
"""

import mlx.core as mx
import pytest
from helpers import layer64
from helpers.kernels import as_dtype, layer_state, rounded, run, step
from peer_kernels import mlx_lm_call, mlx_lm_gated_delta

from mlx_kda.ops import reference64 as oracle
from mlx_kda.runners import metal_kernel
from mlx_kda.runners.counters import Counts, counting

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
    """mlx-lm's kernel for per-channel gates, per token and head."""
    x, dtype = inputs
    kernels = mlx_lm_gated_delta(lambda **a: metal_kernel(**a, runner="emulator-count"))
    kind = getattr(mx, dtype)
    q, k, v, beta = (mx.array(a).astype(kind) for a in (x.q, x.k, x.v, x.beta))
    call = mlx_lm_call(q, k, v, mx.exp(mx.array(x.g)), beta, mx.zeros((1, 1, D, D)))
    counts = counted(lambda: kernels["gated_delta_step_vec"](**call))
    return counts["gated_delta_step_vec"].per(T)


def prefill(inputs, name="chunk", **options):
    x, dtype = inputs
    counts = counted(lambda: run(name, x, dtype, runner="emulator-count", **options))
    return {kernel: c.per(T) for kernel, c in counts.items()}


def test_prefill_meets_its_targets(inputs, vector):
    """Scan: 105 products per 16 tokens and 8 columns. Both: 1/8 of the bytes, 1/4 of the cycles."""
    for mode in ("exact",) if inputs[1] == "float32" else ("exact", "half"):
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_moves_exactly_what_a_step_has_to(dtype):
    """One head, one token: every byte of the inputs once, every byte of the outputs once.

    That is 1.08 x reading and writing the state with 16-bit activations. With float32 ones it is
    1.15 x: weights and windows of the convolution alone are 15 KB there, 11 % of 2 x 64 KB.
    """
    layer = layer64.make(B=1, T=1, H=1, Dk=D, Dv=D, rounded=rounded(dtype))
    counts = counted(
        lambda: step(layer, layer_state(layer, dtype), dtype=dtype, runner="emulator-count")
    )["kda_decode"]
    size, conv_kernel = getattr(mx, dtype).size, 4
    channels = 3 * D  # of q, k and v
    windows = size * (conv_kernel - 1) * channels
    state = 4 * D * D
    read = size * (channels + conv_kernel * channels + 2 * D + 1)
    read += 4 * (1 + 2 * D + 1)  # A_log, dt_bias, weight, length
    assert counts.unique_read == read + windows + state
    assert counts.unique_written == size * D + windows + state
    assert counts.device_bytes <= 1.04 * (counts.unique_read + counts.unique_written)
    share = (counts.unique_read + counts.unique_written) / (2 * state)
    assert share <= 1.1 if dtype == "bfloat16" else 1.1 < share < 1.15
