"""The emulator runs kernels that are known good on Apple GPUs, and agrees with MLX on the CPU.

The kernels are MLX's, from the headers in its wheel, and mlx-lm's, from the installed package.
All run in the checked mode: a clean run is part of the test.
"""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from helpers.launch import launch
from mlx_lm.models.gated_delta import gated_delta_ops
from peer_kernels import (
    mlx_call,
    mlx_gated_delta,
    mlx_header,
    mlx_lm_call,
    mlx_lm_gated_delta,
)
from tolerances import OUTPUT_ROUNDING

from mlx_kda.runners import metal_kernel

checked = partial(metal_kernel, runner="emulator")


def close(a, b, dtype=mx.float32, scale=4):
    """Largest difference within ``scale`` units of the output dtype's rounding."""
    a, b = (np.array(x.astype(mx.float32)) for x in (a, b))
    name = str(dtype).split(".")[-1]
    bound = scale * OUTPUT_ROUNDING[name] * max(1.0, float(np.abs(b).max()))
    assert np.abs(a - b).max() <= bound, (np.abs(a - b).max(), bound)


def delta_inputs(B, T, Hk, Hv, Dk, Dv, dtype=mx.float32, per_channel=False):
    """Correlated keys, slow and fast decay, beta near 1."""
    rng = np.random.default_rng(T + Dk + Dv)
    one = rng.standard_normal((B, 1, Hk, Dk))
    k = 0.7 * one + 0.3 * rng.standard_normal((B, T, Hk, Dk))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    q = rng.standard_normal((B, T, Hk, Dk)) / Dk
    v = rng.standard_normal((B, T, Hv, Dv))
    shape = (B, T, Hv, Dk) if per_channel else (B, T, Hv)
    decay = np.exp(-np.exp(rng.uniform(-7, 1, shape)))
    beta = 1 / (1 + np.exp(-rng.uniform(-1, 5, (B, T, Hv))))
    state = rng.standard_normal((B, Hv, Dv, Dk))
    cast = [mx.array(x, dtype=mx.float32).astype(dtype) for x in (q, k, v, beta)]
    return *cast[:3], mx.array(decay, dtype=mx.float32), cast[3], mx.array(state, dtype=mx.float32)


# ---- MLX's gated delta rule ----


def run_mlx(name, *arrays):
    return mlx_gated_delta(checked, name)(**mlx_call(name, *arrays))


SIZES = [
    (1, 13, 1, 2, 64, 64),
    (2, 16, 2, 2, 128, 64),
    (1, 40, 1, 1, 128, 128),
    (1, 1, 1, 2, 64, 64),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kernel", ["gated_delta_seq", "gated_delta_fused_chunk"])
def test_mlx_gated_delta(kernel, size):
    q, k, v, g, beta, state = delta_inputs(*size)
    # MLX's chunk kernel inverts by a Neumann product: beta near 1 on correlated keys spoils it.
    if kernel == "gated_delta_fused_chunk":
        beta = beta * 0.5
    y, s = run_mlx(kernel, q, k, v, g, beta, state)
    want_y, want_s = mx.fast.gated_delta_update(q, k, v, g, beta, state)
    close(y, want_y, scale=20)
    close(s, want_s, scale=20)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_mlx_gated_delta_in_half_precision(dtype):
    q, k, v, g, beta, state = delta_inputs(1, 24, 1, 2, 64, 64, dtype)
    g = g.astype(dtype)
    want_y, want_s = mx.fast.gated_delta_update(q, k, v, g, beta * 0.5, state)
    for kernel in ("gated_delta_seq", "gated_delta_fused_chunk"):
        y, s = run_mlx(kernel, q, k, v, g, beta * 0.5, state)
        close(y, want_y, dtype)
        close(s, want_s, dtype)


# ---- mlx-lm's gated delta kernels ----


@pytest.fixture(scope="module")
def mlx_lm_kernels():
    return mlx_lm_gated_delta(checked)


def run_mlx_lm(kernel, *arrays, **options):
    return kernel(**mlx_lm_call(*arrays, **options))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_mlx_lm_step(mlx_lm_kernels, per_channel, masked, dtype):
    q, k, v, g, beta, state = delta_inputs(2, 9, 1, 2, 128, 64, dtype, per_channel)
    mask = mx.array(np.random.default_rng(1).uniform(size=(2, 9)) < 0.7) if masked else None
    name = "gated_delta_step" + "_vec" * per_channel + "_mask" * masked
    y, s = run_mlx_lm(mlx_lm_kernels[name], q, k, v, g, beta, state, mask=mask)
    want_y, want_s = gated_delta_ops(q, k, v, g, beta, state, mask)
    if masked:  # the kernel gives zeros at masked tokens, the ops whatever the state gives
        want_y = mx.where(mask[..., None, None], want_y, 0)
    close(y, want_y, dtype)
    close(s, want_s, scale=20)


def test_mlx_lm_packed_equals_its_comparator_bitwise(mlx_lm_kernels):
    """Their packed kernel is the tree kernel bit for bit: the emulator must show that too."""
    inputs = delta_inputs(1, 12, 1, 2, 128, 128, mx.bfloat16)
    tree = run_mlx_lm(mlx_lm_kernels["gated_delta_step_xtree"], *inputs)
    packed = run_mlx_lm(mlx_lm_kernels["gated_delta_step_packed_btree"], *inputs, rows=8)
    generic = run_mlx_lm(mlx_lm_kernels["gated_delta_step"], *inputs)
    for a, b, c in zip(tree, packed, generic, strict=True):
        assert mx.array_equal(a, b) and mx.array_equal(a, c)


# ---- MLX's reductions, softmax, matrix-vector and matrix-matrix products ----


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int32], ids=str)
@pytest.mark.parametrize("op", ["Sum", "Prod"])
def test_mlx_row_reduce(op, dtype):
    rows, width = 8, 300
    rng = np.random.default_rng(0)
    a = rng.integers(-9, 9, (rows, width)) if op == "Sum" else rng.choice([-1, 1], (rows, width))
    a = mx.array(a).astype(dtype)
    kind = "int" if dtype == mx.int32 else "float"
    source = f"""
        constant size_t reduction = {width};
        constant int64_t total = {rows};
        row_reduce_simple<T, {kind}, {op}<{kind}>>(
            a, out, reduction, total, threadgroup_position_in_grid, threadgroups_per_grid,
            thread_position_in_threadgroup, threads_per_threadgroup, thread_index_in_simdgroup,
            simdgroups_per_threadgroup, simdgroup_index_in_threadgroup);
    """
    # Min and Max specialise members inside a class, which g++ does not accept.
    files = ("atomic.h", "reduction/ops.h", "reduction/reduce_row.h")
    out = launch(
        source,
        [a],
        header=mlx_header(*files, without=("Min", "Max")),
        template=[("T", dtype)],
        grid=(64, rows // 4, 1),
        group=64,
        shapes=[(rows,)],
        dtypes=mx.int32 if kind == "int" else mx.float32,
    )
    exact = np.array(a.astype(mx.float32))
    want = exact.sum(axis=1) if op == "Sum" else exact.prod(axis=1)
    np.testing.assert_array_equal(np.array(out), want)


@pytest.mark.parametrize("width", [5, 128, 500])
def test_mlx_softmax(width):
    a = mx.array(np.random.default_rng(1).standard_normal((3, width)).astype(np.float32) * 5)
    source = """
        constant int n = b;
        softmax_single_row<float>(
            a, out, n, threadgroup_position_in_grid.x, thread_position_in_threadgroup.x,
            thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
    """
    header = mlx_header("softmax.h")
    out = launch(source, [a, width], header=header, grid=3 * 128, group=128)
    close(out, mx.softmax(a, axis=-1), scale=8)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_mlx_gemv(dtype):
    rows, width = 37, 150
    rng = np.random.default_rng(2)
    matrix = mx.array(rng.standard_normal((rows, width)) / 12).astype(dtype)
    vector = mx.array(rng.standard_normal(width)).astype(dtype)
    source = f"""
        threadgroup float* none = nullptr;
        GEMVKernel<T, 4, 1, 1, 32, 4, 4, false>::run(
            a, b, (const device T*)b, out, {width}, {rows}, {width}, 1.0f, 0.0f, 1,
            none, threadgroup_position_in_grid, thread_position_in_threadgroup,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """
    constants = {"gemv_wide_has_batch": False, "gemv_wide_do_axpby": False}
    out = launch(
        source,
        [matrix, vector],
        header=mlx_header("gemv.h", constants=constants),
        template=[("T", dtype)],
        grid=(32 * ((rows + 15) // 16), 1, 4),
        group=(32, 1, 4),
        shapes=[(rows,)],
        dtypes=dtype,
    )
    close(out, matrix.astype(mx.float32) @ vector.astype(mx.float32), dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(64, 64, 48), (50, 70, 37)], ids=str)
@pytest.mark.parametrize("transposed", [(False, True), (True, False)], ids=str)
def test_mlx_steel_gemm(size, dtype, transposed):
    """Tiles of threadgroup memory, loaders, fragments by thread_elements, ragged edges."""
    M, N, K = size
    ta, tb = transposed
    bm, bn, bk = 32, 32, 16
    rng = np.random.default_rng(3)
    a, b = (mx.array(rng.standard_normal(s) / 6).astype(dtype) for s in ((M, K), (K, N)))
    aligned = {"M": M % bm == 0, "N": N % bn == 0, "K": K % bk == 0}
    constants = {f"align_{n}": yes for n, yes in aligned.items()}
    constants |= {"has_batch": False, "use_out_source": False, "do_axpby": False}
    tiles_m, tiles_n = -(-M // bm), -(-N // bn)
    leading = [M if ta else K, K if tb else N, N]
    numbers = [M, N, K, *leading, tiles_n, tiles_m, 0, 0, 0, 0, 0, 0, 0, K // bk, 0, 0]
    source = f"""
        const constant auto* p = (const constant GEMMParams*)c;
        const constant auto* more = (const constant GEMMAddMMParams*)c;
        gemm<T, {bm}, {bn}, {bk}, 2, 2, {str(ta).lower()}, {str(tb).lower()}>(
            a, b, a, out, p, more, nullptr, nullptr, thread_index_in_simdgroup,
            simdgroup_index_in_threadgroup, threadgroup_position_in_grid,
            thread_position_in_threadgroup);
    """
    files = ("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h")
    out = launch(
        source,
        [a.T if ta else a, b.T if tb else b, mx.array(numbers, dtype=mx.int32)],
        header=mlx_header(*files, constants=constants),
        template=[("T", dtype)],
        grid=(32 * tiles_n, 2 * tiles_m, 2),
        group=(32, 2, 2),
        shapes=[(M, N)],
        dtypes=dtype,
    )
    close(out, a.astype(mx.float32) @ b.astype(mx.float32), dtype)
