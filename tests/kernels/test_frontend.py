"""Every instantiation of every kernel through a clang front end with Metal's address spaces."""

from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_kda.kernels.arguments import DIMS
from mlx_kda.kernels.decode import simd_groups
from mlx_kda.kernels.sources import SOURCES
from mlx_kda.runners import metal_kernel
from mlx_kda.runners.frontend import check, find_clang

pytestmark = pytest.mark.skipif(find_clang() is None, reason="no clang and no ziglang wheel")

DTYPES = {"float32": "float", "float16": "float16_t", "bfloat16": "bfloat16_t"}
FLOAT32 = ("A_log", "dt_bias", "state", "state_out", "params", "tri", "decay", "weight", "kh")
INT32 = ("lengths", "dims")
SMALL = ("dims", "params")


def templates(name, operand):
    """Every set of template constants of a kernel: (name, values) in the order of its wrapper."""
    sizes = [(Dk, Dv) for Dk in DIMS for Dv in DIMS]
    gates, betas, flags = range(5), range(3), (0, 1)
    if name == "kda_chunk_scan":
        return "OpT InT Dk Dv", [(operand, "InT", *s) for s in sizes]
    if name == "kda_chunk_prepare":
        gates_betas = [(g, b, e) for g in gates for b in betas for e in flags]
        return "OpT Dk GATE BETA DELTA_RULE", [
            (operand, Dk, *each) for Dk in DIMS for each in gates_betas
        ]
    if name == "kda_epilogue":
        return "InT Dv", [("InT", Dv) for Dv in DIMS]
    if name == "kda_prologue":
        return "InT Dk Dv CONV_KERNEL", [("InT", *s, kernel) for s in sizes for kernel in (2, 4)]
    if name == "kda_recurrent":
        # Gates and sizes in full; betas and delta_rule, which meet neither, in turn.
        return "InT Dk Dv GATE BETA DELTA_RULE", [
            ("InT", *s, g, (g + i) % 3, (g + i) % 2) for i, s in enumerate(sizes) for g in gates
        ]
    return "InT Dk Dv SG CONV_KERNEL GATE BETA KEEP", [
        ("InT", *s, simd_groups(s[1]), 4, g, (g + i) % 3, (g + i) % 2)
        for i, s in enumerate(sizes)
        for g in gates
    ]


def generated(name, dtype, operand, names, values):
    """The text that MLX would hand to Metal for one instantiation."""
    source = SOURCES[name]

    def kind(argument):
        if argument in INT32:
            return mx.int32
        if argument in FLOAT32:
            return mx.float32
        return getattr(mx, operand if argument == "kq" else dtype)

    kernel = metal_kernel(
        name=name,
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        source=source.body,
        header=source.header,
    )
    constants = {"InT": getattr(mx, dtype), operand: getattr(mx, operand)}
    return kernel.generate(
        [mx.zeros((3 if n in SMALL else 64,), dtype=kind(n)) for n in source.inputs],
        [kind(n) for n in source.outputs],
        list(zip(names.split(), (constants.get(v, v) for v in values), strict=True)),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SOURCES)
def test_every_instantiation_passes_the_front_end(name, dtype):
    """One text as MLX prints it, and every other set of constants instantiated behind it."""
    operands = ["float32"]
    if "kq" in SOURCES[name].inputs + SOURCES[name].outputs:
        operands.append("float16")
    for operand in operands:
        names, sets = templates(name, operand)
        text = generated(name, dtype, operand, names, sets[0])
        function, first = text.function[:-1].split("<", 1)
        spelled = {"InT": DTYPES[dtype], operand: DTYPES[operand]}
        rest = [", ".join(str(spelled.get(v, v)) for v in values) for values in sets]
        assert first == rest[0]
        more = [f"template [[kernel]] decltype({function}<{a}>) {function}<{a}>;" for a in rest[1:]]
        report = check(replace(text, text="\n".join([text.text, *more, ""])))
        assert not report.diagnostics, "\n".join(map(str, report.diagnostics[:5]))
