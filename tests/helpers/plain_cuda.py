"""The kernels on a CUDA GPU without MLX's allocator and graphs: for compute-sanitizer.

compute-sanitizer does not see into MLX's memory pools (a planted read of unwritten memory goes
unnoticed). Here the text that MLX would compile is compiled by nvcc and launched through cupy, each
array in an allocation of its own, every input copied there from the host; MLX computes on the CPU.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_kda.runners import cuda
from mlx_kda.runners.cuda.header import build
from mlx_kda.runners.text import TYPE_NAMES

# What of MLX's own device header a kernel may use, without the rest of its files.
MLX_UTILS = """
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/cstdint>
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}
"""
CUDA_NAMES = {"float16_t": "__half", "bfloat16_t": "__nv_bfloat16"}
FOLDER = Path(tempfile.gettempdir()) / "mlx-kda-plain-cuda"


def text(kernel, inputs, dtypes, template, name="run") -> str:
    """The whole file that MLX would compile, around the header it includes."""
    header, source, input_names, output_names = build(kernel, inputs, dtypes, template)
    parameters = []
    for given, array in zip(input_names, inputs, strict=True):
        kind = TYPE_NAMES[array.dtype]
        parameters.append(f"const {CUDA_NAMES.get(kind, kind)}* {given}")
        if f"{given}_shape" in source:
            parameters.append(f"const __grid_constant__ Shape {given}_shape")
    for given, dtype in zip(output_names, dtypes, strict=True):
        kind = TYPE_NAMES[dtype]
        parameters.append(f"{CUDA_NAMES.get(kind, kind)}* {given}")
    return (
        '#include "mlx/backend/cuda/device/utils.cuh"\n#include <cooperative_groups.h>\n'
        "#define inf cuda::std::numeric_limits<float>::infinity()\n"
        f"{header}namespace mlx::core::cu {{\n"
        f'extern "C" __global__ void {name}({", ".join(parameters)}) {{\n{source}\n}}\n}}\n'
    )


def use() -> None:
    """From here on runner="cuda" is `launch`."""
    import cupy

    cupy.cuda.set_allocator(None)  # no pool: each array is an allocation of CUDA's
    mx.set_default_device(mx.cpu)
    cuda.CudaKernel.__call__ = lambda self, **call: launch(self.kernel, call)


def launch(kernel, call) -> list[mx.array]:
    import cupy

    inputs = [x if isinstance(x, mx.array) else mx.array(x) for x in call["inputs"]]
    dtypes = call["output_dtypes"]
    template = [tuple(t) for t in call["template"] or ()]
    compiled, name = _compile(kernel, inputs, dtypes, template)
    given = [cupy.asarray(_bytes(x)) for x in inputs]
    sizes = [prod(shape) * t.size for shape, t in zip(call["output_shapes"], dtypes, strict=True)]
    made = [cupy.empty(size, cupy.uint8) for size in sizes]
    group = tuple(min(t, g) for t, g in zip(call["threadgroup"], call["grid"], strict=True))
    blocks = tuple(g // t for t, g in zip(group, call["grid"], strict=True))
    cupy.RawModule(path=str(compiled)).get_function(name)(blocks, group, (*given, *made))
    cupy.cuda.Device().synchronize()
    return [
        mx.array(x.get()).view(t).reshape(shape)
        for x, t, shape in zip(made, dtypes, call["output_shapes"], strict=True)
    ]


def _bytes(x: mx.array) -> np.ndarray:
    x = mx.contiguous(x.reshape(-1))
    return np.array(x if x.dtype == mx.uint8 else x.view(mx.uint8))


def _compile(kernel, inputs, dtypes, template) -> tuple[Path, str]:
    """(cubin, name of its function); compiled once, by content."""
    import cupy

    key = hashlib.sha256(text(kernel, inputs, dtypes, template).encode()).hexdigest()[:16]
    name = f"custom_kernel_{kernel.name}_{key}"
    cubin = FOLDER / f"{name}.cubin"
    if not cubin.exists():
        utils = FOLDER / "mlx/backend/cuda/device/utils.cuh"
        utils.parent.mkdir(parents=True, exist_ok=True)
        utils.write_text(MLX_UTILS)
        source = FOLDER / f"{name}.cu"
        source.write_text(text(kernel, inputs, dtypes, template, name))
        arch = cupy.cuda.Device().compute_capability
        subprocess.run(
            ["nvcc", "-std=c++17", f"-arch=sm_{arch}", "-w", "-lineinfo", "-cubin", f"-I{FOLDER}",
             str(source), "-o", f"{cubin}.{os.getpid()}"],
            check=True,
        )  # fmt: skip
        Path(f"{cubin}.{os.getpid()}").rename(cubin)
    return cubin, name


def nvrtc_errors(library: ctypes.CDLL, source: str, includes: list[Path]) -> str:
    """NVRTC's messages on errors, else an empty string."""
    program = ctypes.c_void_p()
    headers = (ctypes.c_char_p * 1)(MLX_UTILS.encode())
    names = (ctypes.c_char_p * 1)(b"mlx/backend/cuda/device/utils.cuh")
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"k.cu", 1, headers, names)
    options = [b"--gpu-architecture=sm_90", *(f"--include-path={p}".encode() for p in includes)]
    failed = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode() if failed else ""
