"""Metal kernels that others ship, read from the installed packages at run time."""

import re
from pathlib import Path
from unittest import mock

import mlx.core as mx

KERNELS = Path(mx.__file__).parent / "include" / "mlx" / "backend" / "metal" / "kernels"
PREFIX = "mlx/backend/metal/kernels/"


def mlx_header(*names, constants=None, without=(), address_spaces=False):
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
        text, n = re.subn(
            rf"constant bool {name} \[\[function_constant\(\d+\)\]\];",
            f"constant constexpr bool {name} = {str(value).lower()};",
            text,
        )
        assert n == 1, name
    for name in without:
        text, n = re.subn(
            rf"template <typename U>\nstruct {name} \{{.*?\n\}};\n", "", text, flags=re.S
        )
        assert n == 1, name
    spaces = r"struct pointer_element<(device|constant|threadgroup) T\*> \{.*?\};"
    if not address_spaces:
        text = re.sub(r"template <typename T>\n" + spaces, "", text, flags=re.S)
    return "".join(c if ord(c) < 128 else "?" for c in text)


def mlx_lm_gated_delta(metal_kernel):
    """mlx-lm's gated-delta kernels by name, built by its own code with ``metal_kernel``."""
    import mlx_lm.models.gated_delta as module

    made = {}

    def record(**arguments):
        made[arguments["name"]] = metal_kernel(**arguments)
        return made[arguments["name"]]

    with (
        mock.patch.object(mx.metal, "is_available", lambda: True),
        mock.patch.object(mx.fast, "metal_kernel", record),
    ):
        for masked in (False, True):
            for vectorised in (False, True):
                module._make_gated_delta_kernel(masked, vectorised)
        module._make_gated_delta_kernel_xtree()
        module._make_gated_delta_packed_kernel()
    return made
