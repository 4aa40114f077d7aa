"""The strict front-end check: what Apple's compiler refuses is refused, known-good kernels pass."""

import re

import mlx.core as mx
import pytest
from helpers.launch import kernel
from helpers.rich_kernel import HEADER, SOURCE
from peer_kernels import mlx_header, mlx_lm_gated_delta

from mlx_kda.runners import metal_kernel
from mlx_kda.runners.frontend import check, find_clang, frontend_check
from mlx_kda.runners.frontend.lint import lint

needs_clang = pytest.mark.skipif(find_clang() is None, reason="no clang 17 and no ziglang wheel")


def generated(source, header="", dtype=mx.float32):
    arrays = [mx.zeros(64, dtype), mx.zeros(3), mx.array(1.0)]
    made = kernel(source, "a small scalar", header=header)
    return made.generate(arrays, [dtype], [("T", dtype), ("N", 3)])


@needs_clang
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_good_kernel_passes(dtype):
    report = check(
        generated(SOURCE, HEADER + "constant constexpr float table[2] = {1.0f, 2.0f};\n", dtype)
    )
    assert report.diagnostics == []
    assert report.threadgroup == {"s": 256, "tile": 288, "packed": 8}
    assert report.threadgroup_bytes == 552


# The faulty line has FAULT in it, and then what the complaint about it says.
BAD_BODIES = {
    "device pointer for threadgroup memory": """
        threadgroup float s[4];
        device float* p = s;  // FAULT cannot initialize""",
    "write through a constant input": "small[0] = 1.0f;  // FAULT read-only",
    "write through a const input": "a[0] = 1.0f;  // FAULT read-only",
    "casting an address space away": """
        out[0] = *static_cast<const threadgroup float*>(a);  // FAULT address space|not allowed""",
    "double": """
        double x = 1.0f;  // FAULT double
        out[0] = T(x);""",
    "a literal without a suffix": "out[0] = a[0] * 0.5;  // FAULT suffix",
    "a lambda": """
        auto f = [&](float x) { return x; };  // FAULT lambda
        out[0] = f(1.0f);""",
    "float to bfloat without a cast": """
        bfloat b = a[0];  // FAULT implicit conversion
        out[0] = float(b);""",
    "float to half without a cast": """
        half b = a[0];  // FAULT implicit conversion
        out[0] = float(b);""",
    "an initialised threadgroup variable": """
        threadgroup float s = 1.0f;  // FAULT initialiser
        out[0] = s;""",
    "an initialised threadgroup array": """
        threadgroup float s[2] = {1.0f, 2.0f};  // FAULT initialiser
        out[0] = s[0];""",
    "a local variable of a constant space": """
        constant float x = 1.0f;  // FAULT address space
        out[0] = x;""",
    "the C++ library": "out[0] = std::min(1.0f, 2.0f);  // FAULT standard library",
    "an unknown function": "out[0] = frobnicate(a[0]);  // FAULT frobnicate",
    "min of two types": "out[0] = min(a[0], 1);  // FAULT no matching function",
    "a SIMD sum of 64-bit numbers": """
        ulong x = 1;
        out[0] = float(simd_sum(x));  // FAULT no matching function""",
    "matrix load from the wrong type": """
        simdgroup_half8x8 m;
        simdgroup_load(m, a, 8);  // FAULT no matching function
        out[0] = float(m.thread_elements()[0]);""",
    "arithmetic on all of a lane's matrix elements": """
        simdgroup_float8x8 m, n = make_filled_simdgroup_matrix<float, 8>(1.0f);
        simdgroup_load(m, a, 8);
        m.thread_elements() += n.thread_elements();  // FAULT invalid operands|no viable
        out[0] = m.thread_elements()[0];""",
    "an uninitialised variable": """
        float x;
        out[0] = x;  // FAULT uninitialized""",
    "a return above a barrier": """
        if (thread_position_in_grid.x > 5) return;  // FAULT return above
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[0] = 1.0f;""",
    "text that is not ASCII": "out[0] = 1.0f;  // \u00b5s FAULT ASCII",
}
# name: (header, body)
BAD_HEADERS = {
    "a threadgroup variable in a function of the header": (
        """inline float stage(float x) {
          threadgroup float s[4];  // FAULT outside the kernel
          s[0] = x;
          return s[0];
        }""",
        "out[0] = stage(1.0f);",
    ),
    "a pointer parameter without an address space": (
        """inline float sum(const float* p) {  // FAULT without an address space
          return p[0] + p[1];
        }""",
        "float x[2] = {1.0f, 2.0f}; out[0] = sum(x);",
    ),
    "a reference parameter without an address space": (
        """inline void bump(float& x) {  // FAULT without an address space
          x += 1.0f;
        }""",
        "float x = 1.0f; bump(x); out[0] = x;",
    ),
    "an array reference without an address space": (
        """inline float sum(float (&x)[2]) {  // FAULT without an address space
          return x[0] + x[1];
        }""",
        "float x[2] = {1.0f, 2.0f}; out[0] = sum(x);",
    ),
    "an include": ("#include <cmath>  // FAULT is not there", "out[0] = 1.0f;"),
    "function constants": (
        "constant bool flag [[function_constant(0)]];  // FAULT function constants",
        "out[0] = flag ? 1.0f : 0.0f;",
    ),
    "helper of the wrong address space": (
        HEADER,
        "out[0] = helper(a);  // FAULT no matching function",
    ),
    "a helper typed device breaks on an input below 8 elements": (
        "inline float first(const device float* p) { return p[0]; }",
        "out[0] = first(small);  // FAULT no matching function",
    ),
}
BAD = {name: ("", body) for name, body in BAD_BODIES.items()} | BAD_HEADERS


@needs_clang
@pytest.mark.parametrize("name", BAD)
def test_bad_kernel_is_refused(name):
    header, body = BAD[name]
    assert "FAULT" in header + body
    found = frontend_check(generated(body, header + "\n" * bool(header)))
    for text, attribute in ((body, "line"), (header, "header_line")):
        for number, line in enumerate(text.split("\n"), 1):
            if "FAULT" in line:
                words = line.split("FAULT ")[1]
                matching = [d for d in found if re.search(words, d.message)]
                assert matching, [str(d) for d in found]
                assert getattr(matching[0], attribute) == number, str(matching[0])


@needs_clang
def test_too_much_threadgroup_memory():
    body = "threadgroup float s[10000], t[48];\ns[0] = t[0] = 1.0f;\nout[0] = s[0];"
    (complaint,) = frontend_check(generated(body))
    assert "40192 bytes of threadgroup memory" in complaint.message


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
    for name, peer in mlx_lm_gated_delta(metal_kernel).items():
        inputs = [q, q, q, mx.zeros((1, 2, 2, 128)), mx.zeros((1, 8, 2)), state, 3]
        if name.endswith("mask"):
            inputs.append(mx.zeros((1, 9), mx.bool_))
        template = [("InT", dtype), ("StT", mx.float32), *sizes]
        text = peer.generate(inputs, [dtype, mx.float32], template)
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
