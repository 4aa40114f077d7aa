"""The "cuda" runner's text: what ``mx.fast.cuda_kernel`` gets, compiled where NVRTC is.

Nothing runs on a GPU in these tests; `tests/cuda_check.py` does that where there is one.
"""

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import cuda_check
import mlx.core as mx
import pytest
from helpers import launch, on_cuda, plain_cuda, rich_kernel, sanitizer
from peer_kernels import mlx_lm_call, mlx_lm_gated_delta

from mlx_kda.doctor import warm_up
from mlx_kda.kernels import chunk, decode, epilogue, prologue, recurrent, route
from mlx_kda.kernels.sources import MOE_SOURCES, SOURCES, kernel
from mlx_kda.layers import KimiDeltaAttention
from mlx_kda.ops.inputs import CheckedInputs
from mlx_kda.runners import metal_kernel
from mlx_kda.runners.cuda.header import build, device_functions


def kernel_of(source=rich_kernel.SOURCE, header=rich_kernel.HEADER):
    return launch.kernel(source, "a small scalar", header=header, runner="cuda")


def arrays(dtype):
    return [mx.zeros(64, dtype), mx.zeros(3), mx.array(1.0)]


def test_inputs_template_and_attributes_are_declared_in_front_of_the_body():
    template = [("T", mx.bfloat16), ("N", -3), ("F", True)]
    header, source, inputs, outputs = build(
        kernel_of(), arrays(mx.bfloat16), [mx.float16], template
    )
    assert inputs == ["cuda_a", "cuda_small", "cuda_scalar"] and outputs == ["cuda_out"]
    for line in (
        "const auto* a = reinterpret_cast<const bfloat16_t*>(cuda_a);",
        "const auto& scalar = *reinterpret_cast<const float*>(cuda_scalar);",
        "auto* out = reinterpret_cast<float16_t*>(cuda_out);",
        "const int* a_shape = &cuda_a_shape[0];",
        "using T = bfloat16_t;",
        "constexpr int N = -3;",
        "constexpr bool F = 1;",
        "__shared__ float s[64]; __shared__ float tile[8][9];",
    ):
        assert line in source, line
    assert "threadgroup float" not in source and "const uint3 thread_position_in_grid = " in source
    assert "inline T helper(const  T* p)" in header.replace("__device__ ", "")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("inline int f(int x) { return x; }", "__device__ inline int f(int x) { return x; }"),
        ("float f() { if (1) { } return 1; }", "__device__ float f() { if (1) { } return 1; }"),
        (
            "template <class T, int N = (1 < 2)>\nT f(T x) { return x; }",
            "template <class T, int N = (1 < 2)>\n__device__ T f(T x) { return x; }",
        ),
        ("struct S { float a; void g() { } };", "struct S { float a; __device__ void g() { } };"),
        ("enum E { A = 1, B };", "enum E { A = 1, B };"),
        ("float t[2] = {1, 2};", "float t[2] = {1, 2};"),
        ("__device__ inline int f() { }", "__device__ inline int f() { }"),
        ("#define F inline\nF int f() { }", "#define F inline\n__device__ F int f() { }"),
        ("#define G(x) int x() { \\\n  int g() { } }\nint f() { }",
         "#define G(x) int x() { \\\n  int g() { } }\n__device__ int f() { }"),
        ("int a;\nint f(int b) { { } }\nint g() { }",
         "int a;\n__device__ int f(int b) { { } }\n__device__ int g() { }"),
    ],
)  # fmt: skip
def test_functions_of_the_header_become_device_functions(text, expected):
    squeezed = " ".join(device_functions(text).split())
    assert squeezed == " ".join(expected.split())


LOG = """========= COMPUTE-SANITIZER
{"test": "exact", "ok": true}
{"what": "sanitize", "passed": true}
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void mlx::core::cu::copy_v<float, float, unsigned int, 4>(T1 *)+0x1a0
=========     by thread (3,0,0) in block (0,0,0)
=========
========= Host API uninitialized memory access on access by cudaMemcpyAsync source
=========
========= Error: Race reported between Write access at custom_kernel_kda_chunk_scan_0123456789abcdef_8_f(float const *)+0x9a0
=========     and Read access at custom_kernel_kda_chunk_scan_0123456789abcdef_8_f(float const *)+0xb20 [64 hazards]
=========
========= ERROR SUMMARY: 3 errors
"""  # noqa: E501


def test_findings_of_compute_sanitizer_are_told_apart(tmp_path, capsys):
    found = sanitizer.count_findings(LOG)
    assert (found["ours"], found["others"], found["host calls"]) == (1, 1, 1)
    assert found["kda_chunk_scan"] == 1 and found["mlx::core::cu::copy_v"] == 1
    clean = LOG.replace("kda_chunk_scan", "other")
    for text, ok in ((LOG, False), (clean, True), (clean.split("=========     by")[0], False)):
        (tmp_path / "log").write_text(text)
        assert cuda_check.findings(tmp_path / "log") is ok


@pytest.mark.parametrize("group", on_cuda.GROUPS, ids=str)
def test_the_emulator_passes_the_lane_checks_of_cuda_check(group):
    assert not any(on_cuda.lanes(group, runner="emulator").values())


# ---- compiled by NVRTC, from NVIDIA's wheels if they are installed ----


@cache
def toolkit():
    """(library, include folders) of NVRTC from the nvidia-cuda-* wheels, or None."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        base = Path(root) / "cu13"
        libraries = sorted((base / "lib").glob("libnvrtc.so.*"))
        include = base / "include"
        if libraries and (include / "cuda_fp16.h").exists() and (include / "cccl").exists():
            return ctypes.CDLL(str(libraries[0])), [include, include / "cccl"]
    return None


needs_nvrtc = pytest.mark.skipif(
    toolkit() is None, reason="no nvidia-cuda-nvrtc, -runtime, -crt and -cccl wheels"
)


def compile_cuda(kernel, inputs, dtypes, template):
    """The compiler's messages on errors, else an empty string."""
    library, includes = toolkit()
    source = plain_cuda.text(kernel, inputs, dtypes, template)
    return plain_cuda.nvrtc_errors(library, source, includes)


@needs_nvrtc
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_compiles_for_cuda(dtype):
    template = [("T", dtype), ("N", 3)]
    assert compile_cuda(kernel_of(), arrays(dtype), [dtype], template) == ""


@needs_nvrtc
def test_mlx_lm_kernel_compiles_for_cuda():
    kernel = mlx_lm_gated_delta(metal_kernel)["gated_delta_step_vec"]
    q, g = mx.ones((1, 8, 1, 128), mx.bfloat16), mx.ones((1, 8, 1, 128))
    call = mlx_lm_call(q, q, q, g, mx.ones((1, 8, 1)), mx.zeros((1, 1, 128, 128)))
    inputs = [x if isinstance(x, mx.array) else mx.array(x) for x in call["inputs"]]
    assert compile_cuda(kernel, inputs, call["output_dtypes"], call["template"]) == ""


@pytest.fixture
def compiled(monkeypatch):
    """{kernel: what NVRTC said at its first call}; the calls return zeros."""
    said = {}

    def stand_in(name, runner):
        def call(*, inputs, output_dtypes, template, output_shapes, **_):
            if name not in said:
                said[name] = compile_cuda(kernel(name, runner), inputs, output_dtypes, template)
            return [mx.zeros(s, t) for s, t in zip(output_shapes, output_dtypes, strict=True)]

        return call

    for module in (chunk, decode, epilogue, prologue, recurrent, route):
        monkeypatch.setattr(module, "kernel", stand_in)
    return said


@needs_nvrtc
def test_every_kernel_compiles_for_cuda(compiled):
    """A layer's lengths, one after the other, and the router."""
    layer = KimiDeltaAttention(32, 1, 64, conv_kernel=4, norm_eps=1e-5, v_head_dim=32).eval()
    layer.runner = "cuda"
    warm_up([layer], mx.bfloat16)
    route.moe_route(
        mx.zeros((1, 64)), mx.zeros(64), top_k=4, groups=8, kept_groups=2, runner="cuda"
    )
    assert compiled == dict.fromkeys([*SOURCES, *MOE_SOURCES], "")


@needs_nvrtc
def test_half_mode_compiles_for_cuda(compiled):
    q, g = mx.zeros((1, 16, 1, 64), mx.bfloat16), mx.zeros((1, 16, 1, 64))
    x = CheckedInputs(q, q, q, g, mx.zeros((1, 16, 1)))
    chunk.kda_chunk(x, mode="half", runner="cuda")
    assert compiled == {"kda_chunk_prepare": "", "kda_chunk_scan": ""}


@needs_nvrtc
def test_a_wrong_kernel_does_not_compile_for_cuda():
    wrong = kernel_of("out[0] = frobnicate(a[0]);")
    assert "frobnicate" in compile_cuda(wrong, arrays(mx.float32), [mx.float32], None)
