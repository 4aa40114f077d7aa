"""Metal kernels that MLX and mlx-lm ship, read from the installed packages at run time.

They are peers to compare with. They are known to work on Apple GPUs, so they also prove the
emulator.
"""

import re
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

KERNELS = Path(mx.__file__).parent / "include" / "mlx" / "backend" / "metal" / "kernels"
PREFIX = "mlx/backend/metal/kernels/"


def mlx_header(*names, constants=None, without=(), address_spaces=False) -> str:
    """The text of MLX's kernel headers with their includes, ready to be a kernel's header.

    MLX's kernels become plain functions (one body calls them), and function constants get the
    values in ``constants``; a parameter that exists only under a constant stays a parameter.
    Structs in ``without`` are left out, and so are, unless ``address_spaces``, specialisations for
    pointers of the other address spaces, which are one to the emulator's compiler.
    """
    seen, out = {"utils.h", "defines.h"}, []  # MLX puts these before every kernel

    def add(name):
        if name in seen:
            return
        seen.add(name)
        for line in (KERNELS / name).read_text().split("\n"):
            found = re.match(r'#include "' + PREFIX + r'(.*)"', line)
            if found:
                add(found.group(1))
            elif not line.startswith(("#include", "#pragma once", "#pragma METAL")):
                out.append(line)

    for name in names:
        add(name)
    text = "\n".join(out)
    text = re.sub(r"\[\[kernel[^\[\]]*\]\]", "", text)
    text = re.sub(r", function_constant\(\w+\)", "", text)
    for name, value in (constants or {}).items():
        declaration = rf"constant bool {name} \[\[function_constant\(\d+\)\]\];"
        text = _replace_once(
            declaration, f"constant constexpr bool {name} = {str(value).lower()};", text, name
        )
    for name in without:
        struct = rf"template <typename U>\nstruct {name} \{{.*?\n\}};\n"
        text = _replace_once(struct, "", text, name)
    spaces = r"struct pointer_element<(device|constant|threadgroup) T\*> \{.*?\};"
    if not address_spaces:
        text = re.sub(r"template <typename T>\n" + spaces, "", text, flags=re.S)
    return "".join(c if ord(c) < 128 else "?" for c in text)


def _replace_once(pattern, by, text, what):
    text, found = re.subn(pattern, by, text, flags=re.S)
    if found != 1:
        raise LookupError(f"{what} is not in the installed MLX's headers as it was in 0.32.4")
    return text


def mlx_lm_gated_delta(metal_kernel) -> dict:
    """mlx-lm's gated-delta kernels by name, built by its own code with ``metal_kernel``."""
    import mlx_lm.models.gated_delta as module

    made = {}

    def record(**arguments):
        made[arguments["name"]] = metal_kernel(**arguments)
        return made[arguments["name"]]

    with _replaced(mx.metal, is_available=lambda: True), _replaced(mx.fast, metal_kernel=record):
        for masked in (False, True):
            for vectorised in (False, True):
                module._make_gated_delta_kernel(masked, vectorised)
        module._make_gated_delta_kernel_xtree()
        module._make_gated_delta_packed_kernel()
    return made


@contextmanager
def _replaced(module, **functions):
    """Module attributes replaced for the time being."""
    before = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def mlx_lm_call(q, k, v, g, beta, state, mask=None, rows=1) -> dict:
    """The arguments with which mlx-lm calls its kernels; ``rows`` of the state a SIMD-group."""
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    sizes = [("Dk", Dk), ("Dv", Dv), ("Hk", Hk), ("Hv", Hv)]
    return {
        "inputs": [q, k, v, g, beta, state, T] + ([] if mask is None else [mask]),
        "template": [("InT", q.dtype), ("StT", mx.float32), *sizes],
        "grid": (32, Dv // rows, B * Hv),
        "threadgroup": (32, 4, 1),
        "output_shapes": [v.shape, state.shape],
        "output_dtypes": [q.dtype, mx.float32],
    }


def mlx_gated_delta(metal_kernel, name):
    """MLX's own kernel ``name`` ("gated_delta_seq" or "gated_delta_fused_chunk"), scalar gates."""
    cache = "" if name == "gated_delta_fused_chunk" else "(device float*)state_out, "
    return metal_kernel(
        name=name,
        input_names=["q", "k", "v", "state_in", "g", "beta", "T"],
        output_names=["y", "state_out"],
        source=f"""
            constant int tokens = T;
            {name}<InT, Dk, Dv, Hk, Hv, 8>(
                q, k, v, state_in, g, beta, y, state_out, tokens, {cache}thread_position_in_grid,
                thread_position_in_threadgroup, thread_index_in_simdgroup);
        """,
        header=mlx_header("gated_delta_update.h", constants={"save_state": False}),
    )


def mlx_call(name, q, k, v, g, beta, state) -> dict:
    """The arguments with which MLX launches the kernel ``name``; g [B, T, Hv] in q's dtype."""
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    return {
        "inputs": [q, k, v, state, g, beta, T],
        "template": [("InT", q.dtype), ("Dk", Dk), ("Dv", Dv), ("Hk", Hk), ("Hv", Hv)],
        "grid": (32, Dv // 8 if name == "gated_delta_fused_chunk" else Dv, B * Hv),
        "threadgroup": (32, 4, 1),
        "output_shapes": [v.shape, state.shape],
        "output_dtypes": [q.dtype, mx.float32],
    }
