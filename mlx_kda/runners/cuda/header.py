"""From a Metal kernel to what ``mx.fast.cuda_kernel`` compiles: one text of headers, one body."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx

from ..rewrite import Dialect, Token, preprocessor_lines, rewrite, tokens
from ..text import ATTRIBUTES, TYPE_NAMES, Definition, Template, template_value

HERE = Path(__file__).parent
SHARED = HERE.parent / "emulator" / "include"

BEFORE = """
#include <cuda_fp16.h>
namespace mlx::core::cu {
#define METAL_FUNC __device__ __forceinline__
#define __builtin_memcpy memcpy
#define __builtin_isnan ::isnan
#define __builtin_isinf ::isinf
#define __builtin_isfinite ::isfinite
#define __builtin_isnormal(x) (::isfinite(x) && ::fabsf(x) >= __FLT_MIN__)
#define __builtin_signbit ::signbit
#define __builtin_popcountll __popcll
#define __builtin_clzll __clzll
#define __builtin_ctzll(x) (__ffsll((long long)(x)) - 1)
#define __builtin_inff() __builtin_bit_cast(float, 0x7f800000)
#define __builtin_nanf(x) __builtin_bit_cast(float, 0x7fc00000)
#define __FLT_MAX__ 3.40282347e+38f
#define __FLT_MIN__ 1.17549435e-38f
#define __FLT_EPSILON__ 1.19209290e-7f
#define __FLT_DENORM_MIN__ 1.40129846e-45f
"""

# What the attributes of a Metal signature are on a CUDA device.
ATTRIBUTE_VALUES = {
    "dispatch_quadgroups_per_threadgroup": "(emu_group_size() + 3) / 4",
    "dispatch_simdgroups_per_threadgroup": "(emu_group_size() + 31) / 32",
    "dispatch_threads_per_threadgroup": "uint3(blockDim.x, blockDim.y, blockDim.z)",
    "grid_origin": "uint3(0u)",
    "grid_size": "uint3(gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z)",
    "quadgroup_index_in_threadgroup": "emu_index_in_group() / 4",
    "quadgroups_per_threadgroup": "(emu_group_size() + 3) / 4",
    "simdgroup_index_in_threadgroup": "emu_hardware_index() / 32",
    "simdgroups_per_threadgroup": "(emu_group_size() + 31) / 32",
    "thread_execution_width": "32u",
    "thread_index_in_quadgroup": "emu_index_in_group() % 4",
    "thread_index_in_simdgroup": "emu_lane()",
    "thread_index_in_threadgroup": "emu_index_in_group()",
    "thread_position_in_grid": "emu_position_in_group() + "
    "uint3(blockIdx.x * blockDim.x, blockIdx.y * blockDim.y, blockIdx.z * blockDim.z)",
    "thread_position_in_threadgroup": "emu_position_in_group()",
    "threadgroup_position_in_grid": "uint3(blockIdx.x, blockIdx.y, blockIdx.z)",
    "threadgroups_per_grid": "uint3(gridDim.x, gridDim.y, gridDim.z)",
    "threads_per_grid": "uint3(gridDim.x * blockDim.x, gridDim.y * blockDim.y, "
    "gridDim.z * blockDim.z)",
    "threads_per_simdgroup": "32u",
    "threads_per_threadgroup": "uint3(blockDim.x, blockDim.y, blockDim.z)",
}
# MLX's CUDA parameters have other names than the kernel's, which are declared from them.
PREFIX = "cuda_"

# The address spaces cannot be macros here: CUDA's own keywords contain them.
DIALECT = Dialect(
    declare=lambda base, name, suffix, _: f"__shared__ {base} {name}{suffix};",
    erase=frozenset({"device", "constant", "thread", "threadgroup", "kernel"}),
)


@cache
def stand_in() -> str:
    """The stand-in library as one text, the emulator's headers where they fit."""
    math = "".join(
        f"#define __builtin_{name} ::{name}\n"
        for name in sorted(set(re.findall(r"__builtin_(\w+f)\(", _read("math.h"))))
        if name not in ("inff", "nanf")
    )
    constants = re.findall(r"^#define ([A-Z]\w+) ", _read("traits.h"), re.M)
    undefined = "".join(
        f"#undef {c}\n" for c in constants if c not in ("METAL_FUNC", "EMU_DECLARED")
    )
    seen: set[str] = set()
    parts = [_inline(name, seen) for name in ("types.h", "vec.h", "math.h")]
    own = ((HERE / name).read_text() for name in ("simd.h", "matrix.h", "atomic.h"))
    return BEFORE + math + undefined + "".join(parts) + "".join(own)


def _read(name: str) -> str:
    return (SHARED / name).read_text()


_CUT = {"stddef.h", "stdint.h", "counted.h"}


def _inline(name: str, seen: set[str]) -> str:
    """A header with its own includes in place, each once."""
    if name in seen or name in _CUT:
        return ""
    seen.add(name)
    out = []
    for line in _read(name).split("\n"):
        found = re.match(r'#include [<"]([\w.]+)[>"]', line)
        if found:
            out.append(_inline(found.group(1), seen))
        elif line != "#pragma once":
            out.append(line)
    return "\n".join(out)


def device_functions(text: str) -> str:
    """``text`` with ``__device__`` in front of every function it defines outside of functions."""
    macros = preprocessor_lines(text)
    toks = tokens(text)
    code = [t.kind not in ("space", "comment") and t.line not in macros for t in toks]
    marks: set[int] = set()
    start = bodies = 0  # bodies: braces open since a function began
    for i, token in enumerate(toks):
        if not code[i]:
            continue
        if token.text == "{":
            at = _after_template(toks, code, start)
            if not bodies and _has_parameters(
                [t.text for t, c in zip(toks[at:i], code[at:i], strict=True) if c]
            ):
                marks.add(at)
                bodies = 1
            elif bodies:
                bodies += 1
            else:
                start = i + 1
        elif token.text == "}":
            bodies = max(0, bodies - 1)
        if token.text in ("}", ";") and not bodies:
            start = i + 1
    return "".join("__device__ " * (i in marks) + token.text for i, token in enumerate(toks))


def _has_parameters(text: list[str]) -> bool:
    """Whether these tokens begin a function that is not yet a device function."""
    if not text or text[0] in ("struct", "enum", "namespace", "union", "extern"):
        return False
    return "__device__" not in text and "(" in text and "=" not in text[: text.index("(")]


def _after_template(toks: list[Token], code: list[bool], i: int) -> int:
    """The first token of a declaration, after comments, directives and any ``template <...>``."""
    while i < len(toks) and (not code[i] or toks[i].text == "template"):
        if code[i]:
            angle = paren = 0
            while i < len(toks):
                paren += {"(": 1, ")": -1}.get(toks[i].text, 0)
                angle += {"<": 1, ">": -1}.get(toks[i].text, 0) if not paren else 0
                if toks[i].text == ">" and not angle and not paren:
                    break
                i += 1
        i += 1
    return i


def build(
    kernel: Definition,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Template | None,
) -> tuple[str, str, list[str], list[str]]:
    """(header, source, names of the inputs, names of the outputs) for ``mx.fast.cuda_kernel``."""
    header = device_functions(rewrite(kernel.header, DIALECT).text)
    body = rewrite(kernel.source, DIALECT).text
    lines: list[str] = []
    for name, array in zip(kernel.input_names, inputs, strict=True):
        lines += _declare_input(name, array, kernel.source)
    for name, dtype in zip(kernel.output_names, output_dtypes, strict=True):
        kind = TYPE_NAMES[dtype]
        if kernel.atomic_outputs:
            kind = f"atomic<{kind}>"
        lines.append(f"auto* {name} = reinterpret_cast<{kind}*>({PREFIX}{name});")
    for name, value in template or ():
        if isinstance(value, bool | int):
            kind = "bool" if isinstance(value, bool) else "int"
            lines.append(f"constexpr {kind} {name} = {template_value(value)};")
        else:
            lines.append(f"using {name} = {template_value(value)};")
    for name, kind in ATTRIBUTES.items():
        if name in kernel.source:
            lines.append(f"const {kind} {name} = {ATTRIBUTE_VALUES[name]};")
    source = "\n".join(lines) + "\n{\n" + body + "\n}\n"
    end = "\n}  // namespace mlx::core::cu\n"
    return (
        stand_in() + header + end,
        source,
        [PREFIX + name for name in kernel.input_names],
        [PREFIX + name for name in kernel.output_names],
    )


def _declare_input(name: str, array: mx.array, source: str) -> Iterator[str]:
    kind, given = TYPE_NAMES[array.dtype], PREFIX + name
    cast = f"reinterpret_cast<const {kind}*>({given})"
    yield f"const auto& {name} = *{cast};" if array.ndim == 0 else f"const auto* {name} = {cast};"
    if array.ndim > 0:
        if f"{name}_shape" in source:
            yield f"const int* {name}_shape = &{given}_shape[0];"
        if f"{name}_strides" in source:
            yield f"const int64_t* {name}_strides = &{given}_strides[0];"
        if f"{name}_ndim" in source:
            yield f"const int& {name}_ndim = {given}_ndim;"
