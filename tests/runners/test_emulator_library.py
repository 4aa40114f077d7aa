"""The stand-in for Metal's standard library computes what Metal's does, function by function."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.launch import launch

FLOATS = [mx.float32, mx.float16, mx.bfloat16]
RNG = np.random.default_rng(0)


def run(body, inputs, out_dtype=mx.float32, n=64, header="", width=1):
    """out[i] = ... for n threads in threadgroups of 64; inputs are a, b, c."""
    return launch(
        f"uint i = thread_position_in_grid.x;\n{body}",
        inputs,
        header=header,
        template=[("T", inputs[0].dtype)],
        grid=n,
        shapes=[(n * width,)],
        dtypes=out_dtype,
    )


def run_all(expressions, inputs, out_dtype=mx.float32, before=""):
    """{expression: its 64 results}, all from one kernel."""
    lines = [f"out[{k} * 64 + i] = {e};" for k, e in enumerate(expressions)]
    out = run("\n".join([before, *lines]), inputs, out_dtype, width=len(lines))
    return {e: out[k * 64 : k * 64 + 64] for k, e in enumerate(expressions)}


def f64(x):
    return np.array(x.astype(mx.float32)).astype(np.float64)


UNARY = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": lambda x: np.log(np.abs(x) + 1e-3),
    "sqrt": lambda x: np.sqrt(np.abs(x)),
    "rsqrt": lambda x: 1 / np.sqrt(np.abs(x) + 0.5),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "floor": np.floor,
    "ceil": np.ceil,
    "rint": np.rint,
    "trunc": np.trunc,
    "fabs": np.abs,
    "sign": np.sign,
}
ARGUMENT = {"log": "abs(a[i]) + T(1e-3f)", "sqrt": "abs(a[i])", "rsqrt": "abs(a[i]) + T(0.5f)"}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unary_functions_in_all_their_namespaces(dtype):
    a = mx.array(RNG.uniform(-4, 4, 64).astype(np.float32)).astype(dtype)
    eps = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
    calls = {
        f"{space}::{name}({ARGUMENT.get(name, 'a[i]')})": want
        for name, want in UNARY.items()
        for space in ("metal", "metal::fast", "metal::precise")
        if space == "metal" or name != "sign"
    }
    for call, got in run_all(calls, [a], dtype).items():
        np.testing.assert_allclose(f64(got), calls[call](f64(a)), rtol=eps, atol=eps, err_msg=call)


FLOAT_FUNCTIONS = {
    "fma(a[i], b[i], c[i])": lambda a, b, c: a * b + c,
    "min(a[i], b[i])": lambda a, b, c: np.minimum(a, b),
    "max3(a[i], b[i], c[i])": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "clamp(a[i], -1.0f, 0.5f)": lambda a, b, c: np.clip(a, -1, 0.5),
    "mix(a[i], b[i], 0.25f)": lambda a, b, c: a + (b - a) * 0.25,
    "saturate(a[i])": lambda a, b, c: np.clip(a, 0, 1),
    "step(0.5f, a[i])": lambda a, b, c: (a >= 0.5) * 1.0,
    "fmod(a[i], 1.5f)": lambda a, b, c: np.fmod(a, 1.5),
    "fract(a[i])": lambda a, b, c: a - np.floor(a),
    "pow(abs(a[i]), b[i])": lambda a, b, c: np.abs(a) ** b,
    "atan2(a[i], b[i])": lambda a, b, c: np.arctan2(a, b),
    "copysign(a[i], b[i])": lambda a, b, c: np.copysign(a, b),
    "select(a[i], b[i], c[i] > 0.0f)": lambda a, b, c: np.where(c > 0, b, a),
    "ldexp(a[i], 3)": lambda a, b, c: a * 8,
    "as_type<float>(as_type<uint>(a[i]) ^ 0x80000000u)": lambda a, b, c: -a,
    "isnan(a[i] / 0.0f - a[i] / 0.0f) ? 1.0f : 0.0f": lambda a, b, c: np.ones_like(a),
    "dot(float3(a[i], b[i], c[i]), float3(1, 2, 3))": lambda a, b, c: a + 2 * b + 3 * c,
    "length(float2(a[i], b[i]))": lambda a, b, c: np.hypot(a, b),
    "cross(float3(a[i], b[i], c[i]), float3(1, 0, 0)).z": lambda a, b, c: -b,
    "normalize(float2(a[i], b[i])).x": lambda a, b, c: a / np.hypot(a, b),
}


def test_float_functions():
    a, b, c = (mx.array(RNG.uniform(-2, 2, 64).astype(np.float32)) for _ in range(3))
    for expression, got in run_all(FLOAT_FUNCTIONS, [a, b, c]).items():
        want = FLOAT_FUNCTIONS[expression](f64(a), f64(b), f64(c))
        np.testing.assert_allclose(f64(got), want, rtol=2e-6, atol=2e-6, err_msg=expression)


INTEGER_FUNCTIONS = {
    "popcount(a[i])": lambda a: np.array([bin(int(x)).count("1") for x in a]),
    "clz(a[i])": lambda a: np.array([32 - int(x).bit_length() for x in a]),
    "ctz(a[i] | 1024u)": lambda a: np.array([_trailing(int(x) | 1024) for x in a]),
    "mulhi(a[i], 0x80000000u)": lambda a: a >> 1,
    "rotate(a[i], 4u)": lambda a: ((a << 4) | (a >> 28)) & 0xFFFFFFFF,
    "reverse_bits(a[i])": lambda a: np.array([int(f"{int(x):032b}"[::-1], 2) for x in a]),
    "extract_bits(a[i], 3, 5)": lambda a: (a >> 3) & 31,
    "absdiff(a[i], 100000u)": lambda a: np.abs(a - 100000),
    "addsat(a[i], 0xf0000000u)": lambda a: np.minimum(a + 0xF0000000, 0xFFFFFFFF),
    "subsat(a[i], 0xf0000000u)": lambda a: np.maximum(a - 0xF0000000, 0),
    "max(a[i], 77u)": lambda a: np.maximum(a, 77),
}


def test_integer_functions():
    a = RNG.integers(0, 2**32, 64, dtype=np.uint32)
    for expression, got in run_all(INTEGER_FUNCTIONS, [mx.array(a)], mx.uint32).items():
        want = INTEGER_FUNCTIONS[expression](a.astype(np.int64))
        assert (np.array(got).astype(np.int64) == want).all(), expression


def _trailing(x):
    return (x & -x).bit_length() - 1


# ---- 16-bit floats ----


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_16_bit_arithmetic_rounds_once_like_mlx(dtype):
    a = mx.array(RNG.standard_normal(64).astype(np.float32) * 3).astype(dtype)
    b = mx.array(RNG.standard_normal(64).astype(np.float32) + 4).astype(dtype)
    for op in "+-*/":
        got = run(f"out[i] = a[i] {op} b[i];", [a, b], dtype)
        want = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[op]
        assert mx.array_equal(got, want), op
    assert mx.array_equal(run("T x = a[i]; x += b[i]; x *= b[i]; out[i] = -x;", [a, b], dtype),
                          -((a + b) * b))  # fmt: skip


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_narrowing_rounds_to_nearest_even_with_special_values(dtype):
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-7, -6e-8, 65519, 65520, 3.4e38, 1e-41]
    ties = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9]
    values = np.array([*special, *ties] * 4, dtype=np.float32)
    a = mx.array(values)
    got = run("out[i] = half(a[i]);" if dtype == mx.float16 else "out[i] = bfloat(a[i]);",
              [a], dtype)  # fmt: skip
    np.testing.assert_array_equal(np.array(got.astype(mx.float32)),
                                  np.array(a.astype(dtype).astype(mx.float32)))  # fmt: skip


# ---- vectors ----


def test_vectors_swizzles_and_packed_loads():
    a = mx.arange(64, dtype=mx.float32)
    header = "struct pair { float4 first; packed_float3 second; };"
    body = """
    if (i < 16) {
      float4 v = ((const device float4*)a)[i];
      v.xy = v.yx;
      v.zw += v.xy * 2.0f;
      float3 w = v.zyx;
      v.rgb = w;
      packed_float3 p = w;
      pair both = {v, p};
      bool4 big = both.first > float4(20.0f);
      device float4* o = (device float4*)out;
      o[i] = select(both.first, float4(float3(both.second), 1.0f) + float4(half4(v)), big);
      o[i] += float4(as_type<uint4>(v) == as_type<uint4>(both.first));
    }
    """
    got = np.array(run(body, [a], header=header)).reshape(16, 4)
    v = np.arange(64.0).reshape(16, 4)
    v[:, :2] = v[:, 1::-1].copy()
    v[:, 2:] += v[:, :2] * 2
    w = v[:, 2::-1].copy()
    v[:, :3] = w
    other = np.concatenate([w, np.ones((16, 1))], axis=1) + v.astype(np.float16)
    assert (got == np.where(v > 20, other, v) + 1).all()


# ---- SIMD-groups ----

NINES = np.full((2, 3), 9.0)


def lanes(a):
    return np.array(a.astype(mx.float32)).astype(np.float64).reshape(2, 32)


SIMD = {
    "simd_sum(x)": lambda x: x.sum(1, keepdims=True) + 0 * x,
    "simd_product(x)": lambda x: x.prod(1, keepdims=True) + 0 * x,
    "simd_min(x)": lambda x: x.min(1, keepdims=True) + 0 * x,
    "simd_max(x)": lambda x: x.max(1, keepdims=True) + 0 * x,
    "simd_prefix_inclusive_sum(x)": lambda x: x.cumsum(1),
    "simd_prefix_exclusive_sum(x)": lambda x: x.cumsum(1) - x,
    "simd_prefix_inclusive_product(x)": lambda x: x.cumprod(1),
    "simd_shuffle(x, ushort(5))": lambda x: x[:, 5:6] + 0 * x,
    "simd_shuffle(x, ushort(31 - thread_index_in_simdgroup))": lambda x: x[:, ::-1],
    "simd_broadcast(x, 7)": lambda x: x[:, 7:8] + 0 * x,
    "simd_broadcast_first(x)": lambda x: x[:, :1] + 0 * x,
    "simd_shuffle_xor(x, 9)": lambda x: x[:, np.arange(32) ^ 9],
    "simd_shuffle_up(x, 3)": lambda x: np.concatenate([x[:, :3], x[:, :-3]], 1),
    "simd_shuffle_down(x, 3)": lambda x: np.concatenate([x[:, 3:], x[:, -3:]], 1),
    "simd_shuffle_rotate_up(x, 3)": lambda x: np.roll(x, 3, 1),
    "simd_shuffle_rotate_down(x, 3)": lambda x: np.roll(x, -3, 1),
    "simd_shuffle_and_fill_up(x, T(9), 3)": lambda x: np.concatenate([NINES, x[:, :-3]], 1),
    "simd_shuffle_and_fill_down(x, T(9), 3)": lambda x: np.concatenate([x[:, 3:], NINES], 1),
    "T(simd_all(x > T(-99)) ? 1 : 0)": lambda x: np.ones_like(x),
    "T(simd_any(x > T(99)) ? 1 : 0)": lambda x: np.zeros_like(x),
    "quad_sum(x)": lambda x: x.reshape(2, 8, 4).sum(2).repeat(4, 1),
    "quad_max(x)": lambda x: x.reshape(2, 8, 4).max(2).repeat(4, 1),
    "quad_shuffle_xor(x, 2)": lambda x: x[:, np.arange(32) ^ 2],
    "quad_broadcast(x, 1)": lambda x: x.reshape(2, 8, 4)[..., 1].repeat(4, 1),
    "T(simd_is_first() ? 1 : 0)": lambda x: (np.arange(32) == 0) + 0 * x,
}  # fmt: skip


@pytest.mark.parametrize(
    "dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.int16], ids=str
)
def test_simd_functions(dtype):
    """Values of -1, 1 and 2 in small numbers: every result is exact in every dtype."""
    values = RNG.choice([-1, 1], (2, 32))
    values[:, ::8] = 2
    a = mx.array(values.reshape(-1)).astype(dtype)
    for expression, got in run_all(SIMD, [a], dtype, before="T x = a[i];").items():
        assert (lanes(got) == SIMD[expression](lanes(a))).all(), expression


def test_simd_sum_is_the_ascending_butterfly():
    """Lane xor 1, 2, 4, 8, 16: as the explicit tree, bit for bit."""
    a = mx.array(RNG.standard_normal(64).astype(np.float32))
    tree = "".join(f"x += simd_shuffle_xor(x, {1 << s});" for s in range(5))
    explicit = run(f"float x = a[i]; {tree} out[i] = x;", [a])
    assert mx.array_equal(run("out[i] = simd_sum(a[i]);", [a]), explicit)


def test_simd_bits_and_ballot():
    a = mx.array(RNG.integers(0, 2**32, 64, dtype=np.uint32))
    x = np.array(a).reshape(2, 32)
    for name, ufunc in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        got = np.array(run(f"out[i] = simd_{name}(a[i]);", [a], mx.uint32)).reshape(2, 32)
        assert (got == ufunc.reduce(x, 1)[:, None]).all()
    body = "out[i] = uint(simd_vote::vote_t(simd_ballot(a[i] % 3 == 0)));"
    got = np.array(run(body, [a], mx.uint32)).reshape(2, 32)
    want = ((x % 3 == 0).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1)
    assert (got == want[:, None]).all()


def test_a_narrow_simdgroup_reduces_what_it_has():
    """40 threads: a SIMD-group of 32 and one of 8."""
    a = mx.arange(40, dtype=mx.float32)
    got = np.array(run("out[i] = simd_sum(a[i]) + simd_max(a[i]);", [a], n=40))
    x = np.arange(40.0)
    assert (got[:32] == x[:32].sum() + 31).all() and (got[32:] == x[32:].sum() + 39).all()


# ---- atomics ----


def test_threadgroup_atomics():
    body = """
    threadgroup atomic_uint count;
    threadgroup atomic_int most;
    uint l = thread_position_in_threadgroup.x;
    if (l == 0) {
      atomic_store_explicit(&count, 0u, memory_order_relaxed);
      atomic_store_explicit(&most, -5, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&count, l % 2, memory_order_relaxed);
    atomic_fetch_max_explicit(&most, int(l), memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = 100 * atomic_load_explicit(&count, memory_order_relaxed)
        + atomic_load_explicit(&most, memory_order_relaxed);
    """
    assert run(body, [mx.zeros(64)], mx.uint32).tolist() == [100 * 32 + 63] * 64


# ---- matrices of a SIMD-group ----


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
