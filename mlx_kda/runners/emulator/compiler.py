"""Builds a rewritten kernel with the machine's C++ compiler, and keeps the results on disk."""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from ...errors import UserError
from ...files import cache_dir

HERE = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
METAL_HEADERS = (
    "metal_atomic",
    "metal_common",
    "metal_compute",
    "metal_integer",
    "metal_limits",
    "metal_logging",
    "metal_math",
    "metal_matrix",
    "metal_relational",
    "metal_simdgroup",
    "metal_simdgroup_matrix",
    "metal_stdlib",
    "metal_type_traits",
)
RUNTIME = {
    "fast": ("scheduler.cpp", "simd.cpp", "fast.cpp"),
    "checked": ("scheduler.cpp", "simd.cpp", "arena.cpp", "checked.cpp", "hooks.cpp"),
    "count": ("scheduler.cpp", "simd.cpp", "arena.cpp", "count.cpp", "hooks.cpp"),
}
COMMON = [
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-math-errno",
]
KERNEL = {
    "fast": ["-O2", "-fno-trapping-math"],
    "checked": ["-O2", "-g1", "-fno-tree-vectorize", "-fsanitize=thread"],
    "count": [
        "-O3",
        "-g1",
        "-fno-tree-vectorize",
        "-fsanitize=thread",
        "-DEMU_COUNT=1",
    ],
}


def mlx_include() -> Path:
    """The headers in the installed MLX wheel."""
    return Path(mx.__file__).parent / "include"


@lru_cache
def compiler() -> tuple[list[str], str]:
    """(command, version line) of the C++ compiler; UserError if there is none."""
    candidates = [[path] for name in COMPILERS if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang"):
        candidates.append([sys.executable, "-m", "ziglang", "c++"])
    for command in candidates:
        output = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
        if output:
            return command, output.split("\n")[0]
    raise UserError(
        "the kernel emulator needs a C++ compiler and found none of "
        f"{', '.join(COMPILERS)}: install one (Debian: apt install g++; macOS: xcode-select "
        "--install)"
    )


@lru_cache
def _fingerprint() -> str:
    """A hash of the compiler, the processor, MLX's version and the emulator's own sources."""
    digest = hashlib.sha256()
    digest.update(repr(compiler()).encode())
    digest.update(platform.machine().encode())
    digest.update(_processor().encode())
    digest.update(version("mlx").encode())
    sources = [p for folder in ("include", "runtime") for p in (HERE / folder).rglob("*")]
    for path in sorted(p for p in sources if p.is_file()):
        digest.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes())
    digest.update(repr(COMMON).encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n")
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), "")


def is_clang() -> bool:
    """Whether the compiler is a clang."""
    return "clang" in compiler()[1]


def _tune() -> list[str]:
    return ["-march=native"] if platform.machine() in ("x86_64", "AMD64") else []


def _kernel_flags(mode: str) -> list[str]:
    flags = [*COMMON, *_tune(), *KERNEL[mode], "-w"]
    if mode == "count" and platform.machine() in ("x86_64", "AMD64"):
        flags.append("-mno-red-zone")  # it calls the runtime from inline assembly
    if "-fsanitize=thread" not in flags:
        return flags
    # Instrument every memory access, and no function call.
    calls, merged = "tsan-instrument-func-entry-exit=0", "tsan-instrument-read-before-write=1"
    if is_clang():
        return [*flags, "-mllvm", f"-{calls}", "-mllvm", f"-{merged}"]
    flags.append(f"--param={calls}")
    return flags


class BuildFailed(Exception):
    """The compiler's messages."""


def _run(command: list[str], cwd: str | Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise BuildFailed(done.stderr)


def _publish(made: Path, target: Path) -> None:
    """Rename, so that another process never sees half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(made, target)


def _support(mode: str) -> tuple[Path, list[Path]]:
    """The folder of the forwarding metal_* headers, and the runtime's objects for ``mode``."""
    base = cache_dir() / "emulator" / _fingerprint()
    headers = base / "headers"
    objects = [base / mode / (Path(name).stem + ".o") for name in RUNTIME[mode]]
    if all(p.exists() for p in objects) and (headers / "complete").exists():
        return headers, objects
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as work:
        headers.mkdir(exist_ok=True)
        for name in (*METAL_HEADERS, "complete"):
            made = Path(work) / name
            made.write_text('#include "prelude.h"\n')
            _publish(made, headers / name)
        for name, target in zip(RUNTIME[mode], objects, strict=True):
            made = Path(work) / target.name
            flags = [*COMMON, *_tune(), "-O3", "-g1", f"-DEMU_MODE_{mode.upper()}=1"]
            source = HERE / "runtime" / name
            try:
                _run([*compiler()[0], *flags, "-c", str(source), "-o", str(made)], work)
            except BuildFailed as error:
                raise UserError(
                    f"{compiler()[1]} cannot build the kernel emulator (it needs g++ 12 or "
                    f"clang 15, or newer): {str(error).strip().splitlines()[-1]}"
                ) from None
            _publish(made, target)
    return headers, objects


def build(unit: str, mode: str) -> Path:
    """Compile a complete translation unit into a shared object and return its path.

    Raises:
        BuildFailed: the compiler refuses the unit.
        UserError: no compiler, or a cache folder that cannot be written.
    """
    flags = _kernel_flags(mode)
    key = hashlib.sha256(f"{_fingerprint()}\0{flags}\0{unit}".encode()).hexdigest()[:32]
    folder = cache_dir() / "emulator" / _fingerprint()
    target = folder / mode / f"{key}.so"
    if target.exists():
        return target
    try:
        headers, objects = _support(mode)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            _publish(_compile(unit, flags, headers, objects, Path(work)), target)
    except OSError as error:
        raise UserError(f"cannot write compiled kernels to {folder}: {error.strerror}") from None
    return target


def _compile(unit: str, flags: list[str], headers: Path, objects: list[Path], work: Path) -> Path:
    source, made = work / "unit.cpp", work / "unit.so"
    source.write_text(unit)
    includes = [f"-I{HERE / 'include'}", f"-I{headers}", f"-I{mlx_include()}"]
    command = compiler()[0]
    _run([*command, *flags, *includes, "-c", str(source), "-o", "unit.o"], work)
    try:
        _run([*command, "-shared", "-o", str(made), "unit.o", *map(str, objects)], work)
    except BuildFailed as error:
        raise UserError(f"cannot link an emulated kernel: {str(error).strip()[-300:]}") from None
    return made
