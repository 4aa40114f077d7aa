"""The counters: exact on kernels counted by hand, and the calibration of the cycle model."""

import platform

import mlx.core as mx
import numpy as np
import pytest
from helpers.launch import arguments, kernel, launch
from peer_kernels import mlx_call, mlx_gated_delta, mlx_lm_call, mlx_lm_gated_delta

from mlx_kda.runners import metal_kernel
from mlx_kda.runners.counters import Counts, count, counting
from mlx_kda.runners.emulator.compiler import is_clang

drops_loads = pytest.mark.skipif(
    is_clang() or platform.machine() != "x86_64", reason="only g++ on x86-64 drops repeated loads"
)


def counted(source, dtype=mx.float32, grid=64):
    """The counts of a body with inputs a (64 ones) and small."""
    call = arguments([mx.ones(64, dtype), mx.array([2.0, 3.0])], dtypes=dtype, grid=grid)
    return count(kernel(source, "a small"), **call, template=[("T", dtype)])


I = "uint i = thread_position_in_grid.x;\n"


@pytest.mark.parametrize(
    "expression, expected",
    [
        ("x * y + z", {"fma": 1}),
        ("z + x * y", {"fma": 1}),
        ("x * y - z", {"fma": 1}),
        ("x * y + z * x", {"fma": 1, "mul": 1}),
        ("x * y", {"mul": 1}),
        ("x + y - z", {"add": 2}),
        ("x * y * z", {"mul": 2}),
        ("(x * y) * z + x", {"mul": 1, "fma": 1}),
        ("fma(x, y, z)", {"fma": 1}),
        ("-x", {}),
        ("fabs(x)", {}),
        ("x * 2.0f + 1.0f", {"fma": 1}),
        ("x / y", {"division": 1}),
        ("exp(x) + rsqrt(y)", {"special": 2, "add": 1}),
        ("metal::fast::exp2(x)", {"special": 1}),
        ("max(x, 0.0f)", {"minmax": 1}),
        ("clamp(x, 0.0f, 1.0f)", {"minmax": 2}),
        ("x > y ? x : y", {"compare": 1}),
        ("dot(float4(x, y, z, x), float4(x))", {"mul": 1, "fma": 3}),
        ("(float4(x) * float4(y) + float4(z)).x", {"fma": 4}),
        ("(float2(x) + float2(y)).x", {"add": 2}),
        ("float(i * 3 + 1)", {}),
    ],
)
def test_arithmetic(expression, expected):
    source = I + f"float x = small[0], y = small[1], z = a[i];\nout[i] = {expression};"
    counts = counted(source)
    seen = {
        name: getattr(counts, name)
        for name in ("fma", "add", "mul", "division", "special", "minmax", "compare")
        if getattr(counts, name)
    }
    assert seen == {name: 2 * n for name, n in expected.items()}  # two SIMD-groups


def test_a_named_product_is_not_fused():
    counts = counted(I + "float p = a[i] * small[0];\nfloat q = p + 1.0f;\nout[i] = q + p;")
    assert (counts.mul, counts.add, counts.fma) == (2, 4, 0)


def test_vectors_accumulate_with_fma():
    source = (
        I
        + """
    float4 x = float4(a[i]), y = x;
    y += x * small[0];
    x.xy -= y.zw;
    out[i] = x.x + y.w;
    """
    )
    counts = counted(source)
    assert (counts.fma, counts.mul, counts.add) == (8, 0, 6)


def test_an_instruction_counts_once_for_its_simdgroup():
    """Whatever its lanes do: all of them, one of them, or some of them twice."""
    source = (
        I
        + """
    float x = a[i];
    if (i % 32 == 0) x = x + 1.0f;
    for (uint k = 0; k < i % 4; ++k) x = x * 1.5f;
    out[i] = x;
    """
    )
    counts = counted(source)
    assert (counts.add, counts.mul, counts.simdgroups, counts.threadgroups) == (2, 6, 2, 1)


def test_simd_operations_and_barriers():
    source = (
        I
        + """
    threadgroup float s[64];
    s[i] = simd_sum(a[i]) + simd_max(a[i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float x = simd_shuffle_xor(s[63 - i], 1) + simd_broadcast(a[i], 3);
    x += simd_prefix_inclusive_sum(x);
    if (simd_any(x > 100.0f)) x = 0.0f;
    simdgroup_barrier(mem_flags::mem_none);
    out[i] = x;
    """
    )
    c = counted(source)
    assert (c.simd_sums, c.shuffles, c.simd_scans, c.simd_votes) == (4, 4, 2, 2)
    assert (c.barriers, c.simd_barriers) == (2, 2)
    assert c.threadgroup_memory == 256


def test_matrix_operations():
    source = """
    simdgroup_float8x8 m, n;
    simdgroup_load(m, a, 8);
    n = make_filled_simdgroup_matrix<float, 8>(1.0f);
    for (int k = 0; k < 5; ++k) simdgroup_multiply_accumulate(n, m, n, n);
    simdgroup_store(n, out, 8);
    """
    c = counted(source, grid=32)
    assert (c.mma, c.fma, c.device_bytes, c.unique_read, c.unique_written) == (5, 0, 512, 256, 256)


def test_device_bytes_are_requested_once_per_simdgroup():
    """Broadcast, coalesced and repeated reads."""
    c = counted(I + "out[i] = a[0];")
    assert (c.device_bytes, c.device_lane_bytes) == (2 * 4 + 256, 512)
    assert (c.unique_read, c.unique_written) == (4, 256)
    c = counted(I + "out[i] = a[i / 4] + a[63 - i];")
    assert (c.device_bytes, c.unique_read) == (2 * 32 + 256 + 256, 256)


@drops_loads
def test_what_a_thread_has_in_registers_is_not_read_again():
    """As Metal's compiler may: across SIMD operations, but not across barriers."""
    c = counted(I + "float x = a[i]; x += simd_sum(x); out[i] = x * a[i];")
    assert c.device_bytes == 512
    source = "float x = a[i]; threadgroup_barrier(mem_flags::mem_device); out[i] = x * a[i];"
    assert counted(I + source).device_bytes == 768


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_conversions_of_16_bit_floats(dtype):
    c = counted(I + "out[i] = T(float(a[i]) * 2.0f);", dtype=dtype)
    assert (c.convert, c.mul, c.device_bytes) == (4, 2, 256)
    source = """
    simdgroup_matrix<T, 8, 8> m;
    simdgroup_load(m, a, 8);
    simdgroup_multiply(m, m, m);
    simdgroup_store(m, out, 8);
    """
    c = counted(source, dtype=dtype, grid=32)
    assert (c.convert, c.mma) == (0, 1)


def test_constant_and_threadgroup_bytes():
    source = (
        I
        + """
    threadgroup half s[64];
    s[i] = half(a[i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = float(s[i ^ 1]) + float(s[0]) + small[0];
    """
    )
    c = counted(source)
    assert c.threadgroup_bytes == 2 * (64 + 64 + 2)
    assert c.constant_bytes == 2 * 4 and c.device_bytes == 512


def test_counts_add_and_divide():
    a = Counts(fma=2, device_bytes=128, threadgroup_memory=4)
    both = a + Counts(fma=4, mma=1, threadgroup_memory=9)
    assert (both.fma, both.mma, both.threadgroup_memory) == (6, 1, 9)
    assert both.per(2) == Counts(fma=3, mma=0.5, device_bytes=64, threadgroup_memory=9)
    assert both.alu_cycles == (6 + 18) / 4 and both.l1_cycles == 2
    assert both.cycles_serial == 8 and both.cycles_overlapped == 6


def test_results_of_a_counted_run_are_right():
    a = mx.random.normal((64,))
    source = I + "out[i] = exp(a[i]) * 2.0f + simd_sum(a[i]);"
    with counting() as log:
        out = launch(source, [a], group=32, runner="emulator-count")
    want = np.exp(np.array(a)) * 2 + np.array(a).reshape(2, 32).sum(1).repeat(32)
    np.testing.assert_allclose(np.array(out), want, rtol=2e-6, atol=2e-5)
    assert [name for name, _ in log] == ["tested"] and log[0][1].special == 2


@drops_loads
def test_mlx_lm_vector_kernel_calibrates_the_model():
    """By hand: 1,760 ALU and 2,050 L1 core-cycles per token and head at Dk = Dv = 128, bfloat16."""
    T, H, D, dtype = 64, 1, 128, mx.bfloat16
    q, g = mx.ones((1, T, H, D), dtype), mx.ones((1, T, H, D))
    step = mlx_lm_gated_delta(metal_kernel)["gated_delta_step_vec"]
    arrays = (q, q, q, g, mx.ones((1, T, H), dtype), mx.zeros((1, H, D, D)))
    per = count(step, **mlx_lm_call(*arrays)).per(T * H)
    assert per.simd_sums == 2 * D and per.fma == 3 * 4 * D
    assert per.alu_cycles == pytest.approx(1760, rel=0.07)
    assert per.l1_cycles == pytest.approx(2050, rel=0.03)


def test_mlx_chunk_kernel_does_102_matrix_products_for_8_tokens_and_8_columns():
    T, D = 16, 128
    name = "gated_delta_fused_chunk"
    q, g = mx.ones((1, T, 1, D)), mx.ones((1, T, 1))
    call = mlx_call(name, q, q, q, g, g, mx.zeros((1, 1, D, D)))
    c = count(mlx_gated_delta(metal_kernel, name), **call)
    assert c.mma == 102 * (T // 8) * (D // 8)


def test_a_log_inside_a_log_ends_alone():
    """Logs that hold the same launches are told apart: the outer one goes on."""
    with counting() as outer:
        assert counted(I + "out[i] = a[i] + 1.0f;").add == 2
        counted(I + "out[i] = a[i] + 1.0f;")
    assert len(outer) == 2
