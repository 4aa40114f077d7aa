"""The strict front-end check: what Apple's compiler refuses is refused, known-good kernels pass."""

import mlx.core as mx
import pytest

from mlx_kda.bench.shipped import mlx_header, mlx_lm_gated_delta
from mlx_kda.runners import metal_kernel
from mlx_kda.runners.frontend import check, find_clang, frontend_check
from mlx_kda.runners.frontend.lint import lint

needs_clang = pytest.mark.skipif(find_clang() is None, reason="no clang 17 and no ziglang wheel")

GOOD = """
    threadgroup float s[64], tile[8][9];
    threadgroup half4 packed;
    uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x;
    s[l] = float(a[i]) * 2.0f;
    if (l == 0) packed = half4(1.0h, half(0.5f), half2(0.0h));
    tile[l % 8][l % 9] = 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const auto first = small;
    float x = simd_sum(s[63 - l]) + first[0] + scalar;
    float4 v = float4(x, 1.0f, float2(x, x));
    v.xy = v.yx + v.zw;
    simdgroup_float8x8 m, n = make_filled_simdgroup_matrix<float, 8>(1.0f);
    simdgroup_load(m, s, 8);
    simdgroup_multiply_accumulate(m, m, n, m);
    m.thread_elements()[0] += metal::fast::exp(x);
    x += helper(s) + dot(v, v) + clamp(x, 0.0f, 1.0f) + as_type<float>(as_type<uint>(x));
    if (i < 64) out[i] = T(x + float(packed.x));
"""
HEADER = """
template <typename T>
inline T helper(const threadgroup T* p) {
  return p[0] > 0 ? p[1] : T(0);
}
constant constexpr float table[3] = {1.0f, 2.0f, 3.0f};
"""


def generated(source, header="", dtype=mx.float32):
    kernel = metal_kernel(
        name="checked",
        input_names=["a", "small", "scalar"],
        output_names=["out"],
        source=source,
        header=header,
    )
    arrays = [mx.zeros(64, dtype), mx.zeros(3), mx.array(1.0)]
    return kernel.generate(arrays, [dtype], [("T", dtype)])


@needs_clang
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_good_kernel_passes(dtype):
    report = check(generated(GOOD, HEADER, dtype))
    assert report.diagnostics == []
    assert report.threadgroup == {"s": 256, "tile": 288, "packed": 8}
    assert report.threadgroup_bytes == 552


# name: (words of the complaint, body, header); the faulty line has FAULT in it
BAD = {
    "device pointer for threadgroup memory": (
        "cannot initialize",
        "threadgroup float s[4];\ndevice float* p = s;  // FAULT",
        "",
    ),
    "helper of the wrong address space": (
        "no matching function",
        "out[0] = helper(a);  // FAULT",
        HEADER,
    ),
    "a helper typed device breaks on an input below 8 elements": (
        "no matching function",
        "out[0] = first(small);  // FAULT",
        "inline float first(const device float* p) { return p[0]; }",
    ),
    "write through a constant input": ("read-only", "small[0] = 1.0f;  // FAULT", ""),
    "write through a const input": ("read-only", "a[0] = 1.0f;  // FAULT", ""),
    "casting an address space away": (
        "address space|not allowed|differs",
        "out[0] = *static_cast<const threadgroup float*>(a);  // FAULT",
        "",
    ),
    "double": ("double", "double x = 1.0f;  // FAULT\nout[0] = T(x);", ""),
    "a literal without a suffix": ("suffix", "out[0] = a[0] * 0.5;  // FAULT", ""),
    "a lambda": ("lambda", "auto f = [&](float x) { return x; };  // FAULT\nout[0] = f(1.0f);", ""),
    "float to bfloat without a cast": (
        "implicit conversion",
        "bfloat b = a[0];  // FAULT\nout[0] = float(b);",
        "",
    ),
    "float to half without a cast": (
        "implicit conversion",
        "half b = a[0];  // FAULT\nout[0] = float(b);",
        "",
    ),
    "an initialised threadgroup variable": (
        "initialiser",
        "threadgroup float s = 1.0f;  // FAULT\nout[0] = s;",
        "",
    ),
    "an initialised threadgroup array": (
        "initialiser",
        "threadgroup float s[2] = {1.0f, 2.0f};  // FAULT\nout[0] = s[0];",
        "",
    ),
    "a threadgroup variable in a function of the header": (
        "outside the kernel",
        "out[0] = stage(1.0f);",
        "inline float stage(float x) {\n  threadgroup float s[4];  // FAULT\n  s[0] = x;\n"
        "  return s[0];\n}\n",
    ),
    "a pointer parameter without an address space": (
        "without an address space",
        "float x[2] = {1.0f, 2.0f};\nout[0] = sum(x);",
        "inline float sum(const float* p) {  // FAULT\n  return p[0] + p[1];\n}\n",
    ),
    "a reference parameter without an address space": (
        "without an address space",
        "float x = 1.0f;\nbump(x);\nout[0] = x;",
        "inline void bump(float& x) {  // FAULT\n  x += 1.0f;\n}\n",
    ),
    "an array reference without an address space": (
        "without an address space",
        "float x[2] = {1.0f, 2.0f};\nout[0] = sum(x);",
        "inline float sum(float (&x)[2]) {  // FAULT\n  return x[0] + x[1];\n}\n",
    ),
    "a local variable of a constant space": (
        "address space",
        "constant float x = 1.0f;  // FAULT\nout[0] = x;",
        "",
    ),
    "an include": ("is not there", "out[0] = 1.0f;", "#include <cmath>  // FAULT\n"),
    "the C++ library": ("standard library", "out[0] = std::min(1.0f, 2.0f);  // FAULT", ""),
    "an unknown function": ("frobnicate", "out[0] = frobnicate(a[0]);  // FAULT", ""),
    "min of two types": ("no matching function", "out[0] = min(a[0], 1);  // FAULT", ""),
    "a SIMD sum of 64-bit numbers": (
        "no matching function",
        "ulong x = 1;\nout[0] = float(simd_sum(x));  // FAULT",
        "",
    ),
    "matrix load from the wrong type": (
        "no matching function",
        "simdgroup_half8x8 m;\nsimdgroup_load(m, a, 8);  // FAULT\n"
        "out[0] = float(m.thread_elements()[0]);",
        "",
    ),
    "arithmetic on all of a lane's matrix elements": (
        "invalid operands|no viable",
        "simdgroup_float8x8 m, n = make_filled_simdgroup_matrix<float, 8>(1.0f);\n"
        "simdgroup_load(m, a, 8);\nm.thread_elements() += n.thread_elements();  // FAULT\n"
        "out[0] = m.thread_elements()[0];",
        "",
    ),
    "an uninitialised variable": (
        "uninitialized",
        "float x;\nout[0] = x;  // FAULT",
        "",
    ),
    "a return above a barrier": (
        "return above",
        "if (thread_position_in_grid.x > 5) return;  // FAULT\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\nout[0] = 1.0f;",
        "",
    ),
    "text that is not ASCII": ("ASCII", "out[0] = 1.0f;  // FAULT \u00b5s", ""),
    "function constants": (
        "function constants",
        "out[0] = flag ? 1.0f : 0.0f;",
        "constant bool flag [[function_constant(0)]];  // FAULT\n",
    ),
    "too much threadgroup memory": (
        "40192 bytes of threadgroup memory",
        "threadgroup float s[10000], t[48];\ns[0] = t[0] = 1.0f;\nout[0] = s[0];",
        "",
    ),
}


@needs_clang
@pytest.mark.parametrize("name", BAD)
def test_bad_kernel_is_refused(name):
    import re

    words, body, header = BAD[name]
    found = frontend_check(generated(body, header))
    matching = [d for d in found if re.search(words, d.message)]
    assert matching, [str(d) for d in found]
    for text, attribute in ((body, "line"), (header, "header_line")):
        lines = [i for i, s in enumerate(text.split("\n"), 1) if "FAULT" in s]
        if lines:
            assert getattr(matching[0], attribute) == lines[0], str(matching[0])


def test_lint_needs_no_clang():
    text = generated("out[0] = 0.5;\nauto f = [](float x) { return x; };")
    complaints = [message for _, message in lint(text, house_rules=True)]
    assert len(complaints) == 2


def test_return_rule_is_per_function():
    """A return in a helper, or below the last barrier, is fine."""
    header = "inline float half_of(float x) {\n  if (x < 0.0f) return 0.0f;\n  return x;\n}\n"
    body = """
    for (int i = 0; i < 2; ++i) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (thread_position_in_grid.x > 5) return;
    out[0] = half_of(1.0f);
    """
    assert list(lint(generated(body, header), house_rules=True)) == []


@needs_clang
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_mlx_lm_kernels_pass(dtype):
    q, state = mx.zeros((1, 2, 2, 128), dtype), mx.zeros((1, 2, 128, 128))
    sizes = [("Dk", 128), ("Dv", 128), ("Hk", 2), ("Hv", 2)]
    for name, kernel in mlx_lm_gated_delta(metal_kernel).items():
        inputs = [q, q, q, mx.zeros((1, 2, 2, 128)), mx.zeros((1, 8, 2)), state, 3]
        if name.endswith("mask"):
            inputs.append(mx.zeros((1, 9), mx.bool_))
        template = [("InT", dtype), ("StT", mx.float32), *sizes]
        text = kernel.generate(inputs, [dtype, mx.float32], template)
        assert frontend_check(text) == [], name


# Not steel_gemm: it copies a struct whole into threadgroup memory, which clang refuses.
SHIPPED = {
    "gated_delta": (
        ["gated_delta_update.h"],
        {"save_state": False},
        ["gated_delta_fused_chunk<T, 128, 128, 2, 4, 8>", "gated_delta_seq<T, 128, 64, 2, 4, 8>"],
    ),
    "softmax": (["softmax.h"], {}, ["softmax_single_row<T, float>", "softmax_looped<T, float>"]),
    "row_reduce": (
        ["atomic.h", "reduction/ops.h", "reduction/reduce_row.h"],
        {},
        ["row_reduce_simple<T, float, Sum<float>>", "row_reduce_looped<T, T, Max<T>, int, 2>"],
    ),
    "gemv": (
        ["gemv.h"],
        {"gemv_wide_has_batch": False, "gemv_wide_do_axpby": False},
        ["gemv<T, 4, 1, 1, 32, 4, 4, false, false>"],
    ),
}


@needs_clang
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat"])
@pytest.mark.parametrize("name", SHIPPED)
def test_mlx_shipped_kernels_pass(name, dtype):
    """Without the house rules: MLX returns above uniform barriers and trusts half to narrow."""
    files, constants, instances = SHIPPED[name]
    text = mlx_header(*files, constants=constants, address_spaces=True)
    for instance in instances:
        call = instance.replace("T,", f"{dtype},").replace("<T>", f"<{dtype}>")
        text += f"\ntemplate decltype({call}) {call};\n"
    assert [str(d) for d in frontend_check(text, house_rules=False)] == []
