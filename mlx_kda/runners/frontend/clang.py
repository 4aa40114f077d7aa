"""Finds a clang and gives it the headers that stand in for Metal's."""

import importlib.util
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from ...errors import UserError
from ..emulator.compiler import mlx_include

HERE = Path(__file__).parent
# The first version that can compute with bfloat.
OLDEST = 17
FLAGS = [
    "-std=c++14",
    "-S",
    "-O0",
    "-Wall",
    "-Werror",
    "-Wimplicit-float-conversion",
    "-Wno-implicit-int-float-conversion",
    "-Wuninitialized",
    "-Wconditional-uninitialized",
    "-Wno-c++17-extensions",  # MLX's own kernels use if constexpr
    "-Wno-duplicate-decl-specifier",  # constant implies const here
    "-Wno-unused-const-variable",  # a shared header serves several kernels
    "-Wno-unused-function",
    "-Wno-undefined-inline",  # the stand-in only declares
    "-Wno-unused-command-line-argument",  # the ziglang wheel adds arguments of its own
    "-ferror-limit=20",
    "-fno-caret-diagnostics",
]


@lru_cache
def find_clang() -> tuple[list[str], str] | None:
    """(command, version) of a clang++ of version 17 or newer, else the ziglang wheel's, or None."""
    names = ["clang++", *(f"clang++-{n}" for n in range(OLDEST + 13, OLDEST - 1, -1))]
    for name in names:
        path = shutil.which(name)
        if path and (version := _version([path])):
            return [path], version
    if importlib.util.find_spec("ziglang"):
        command = [sys.executable, "-m", "ziglang", "c++", "-fno-sanitize=all"]
        if version := _version(command):
            return command, version
    return None


def _version(command: list[str]) -> str:
    output = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"clang version (\d+)\.\S*", output)
    return found.group() if found and int(found.group(1)) >= OLDEST else ""


def headers(folder: Path) -> list[str]:
    """Include flags; headers of MLX that need changes are written to ``folder``."""
    include = mlx_include()
    stand_in = HERE.parent / "emulator" / "include"
    kernels = Path("mlx") / "backend" / "metal" / "kernels"
    (folder / kernels).mkdir(parents=True, exist_ok=True)
    text = (include / kernels / "utils.h").read_text()
    # clang has no array parameters in an address space; they are pointers.
    text = re.sub(r"(constant const int64_t) strides\[\d\]", r"\1* strides", text)
    (folder / kernels / "utils.h").write_text(text)
    for name in ("bf16_math.h", "complex.h"):
        shutil.copy(stand_in / kernels / name, folder / kernels / name)
    for name in ("metal_stdlib", "metal_math", "metal_logging"):
        (folder / name).write_text("#pragma once\n")
    # The emulator's folder comes last: it is there for traits.h and numbers.h only.
    return [f"-I{path}" for path in (HERE / "include", folder, include, stand_in)]


def compile_text(text: str, name: str, folder: Path) -> tuple[str, str]:
    """(messages, assembly) of clang for a text that follows the stand-in headers."""
    found = find_clang()
    if found is None:
        raise UserError(
            f"no clang of version {OLDEST} or newer for the front-end check: pip install ziglang"
        )
    source, out = folder / "unit.cpp", folder / "unit.s"
    source.write_text(f'#include "frontend.h"\n#line 1 "{name}"\n{text}')
    command = [*found[0], *FLAGS, *headers(folder), "-o", str(out), str(source)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode and "error" not in done.stderr:
        raise UserError(f"clang failed without a message: {done.stderr.strip()[-300:]}")
    return done.stderr, out.read_text() if out.exists() else ""
