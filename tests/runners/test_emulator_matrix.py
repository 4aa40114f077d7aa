"""Matrices of a SIMD-group in the emulator: Apple's layout, mixed operands, loads and stores."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.launch import launch

RNG = np.random.default_rng(0)


def matrices(body, *arrays):
    out = launch(body, [mx.array(x) for x in arrays], shapes=[(8, 8)], grid=32)
    return np.array(out)


def test_matrix_layout_is_apples():
    """Lane l holds (row, col), (row, col + 1): both ways round."""
    body = """
    const uint l = thread_index_in_simdgroup;
    const short qid = l / 4, fm = (qid & 4) + (l / 2) % 4, fn = (qid & 2) * 2 + (l % 2) * 2;
    simdgroup_float8x8 m;
    m.thread_elements()[0] = 8 * fm + fn;
    m.thread_elements()[1] = 8 * fm + fn + 1;
    simdgroup_store(m, out, 8);
    """
    assert (matrices(body, np.zeros(8, np.float32)) == np.arange(64).reshape(8, 8)).all()


def test_matrix_loads_products_and_stores():
    a, b, c = (RNG.integers(-4, 5, (8, 8)).astype(np.float32) for _ in range(3))
    body = """
    simdgroup_float8x8 x, y, z;
    simdgroup_load(x, a, 8);
    simdgroup_load(y, b, 8, ulong2(0, 0), true);
    simdgroup_load(z, c, 8);
    simdgroup_multiply_accumulate(z, x, y, z);
    simdgroup_store(z, out, 8, ulong2(0, 0), true);
    """
    assert (matrices(body, a, b, c) == (a @ b.T + c).T).all()


@pytest.mark.parametrize("left, right", [("half", "float"), ("bfloat", "half"), ("half", "half")])
def test_matrix_operands_may_be_mixed(left, right):
    a, b = (RNG.integers(-4, 5, (8, 8)).astype(np.float32) for _ in range(2))
    body = f"""
    threadgroup {left} s[64];
    threadgroup {right} t[64];
    const uint l = thread_index_in_simdgroup;
    for (uint k = l; k < 64; k += 32) {{ s[k] = {left}(a[k]); t[k] = {right}(b[k]); }}
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<{left}, 8, 8> x;
    simdgroup_matrix<{right}, 8, 8> y;
    simdgroup_load(x, s, 8);
    simdgroup_load(y, t, 8);
    simdgroup_float8x8 z = simdgroup_float8x8(3.0f);
    simdgroup_multiply_accumulate(z, x, y, z);
    simdgroup_store(z, out, 8);
    """
    assert (matrices(body, a, b) == a @ b + 3 * np.eye(8)).all()


def test_matrix_origin_and_stride():
    a = np.arange(12 * 16, dtype=np.float32).reshape(12, 16)
    body = "simdgroup_float8x8 m; simdgroup_load(m, a, 16, ulong2(5, 3)); simdgroup_store(m, out);"
    assert (matrices(body, a) == a[3:11, 5:13]).all()
