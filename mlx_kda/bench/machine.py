"""The machine and the versions behind a measurement."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import __version__

_PACKAGES = ("mlx", "mlx-lm", "numpy")
# On a CUDA GPU, those of these that are installed.
_CUDA_PACKAGES = (
    "mlx-cuda-13",
    "mlx-cuda-12",
    "torch",
    "triton",
    "fla-core",
    "tokenspeed-flashkda",
)
_MISSING = "not installed"


def describe(command: str) -> dict[str, Any]:
    """Chip, cores, memory, system, device, package versions, commit, date and the command."""
    device = _device()
    versions = {"mlx-kda": __version__} | {name: _version(name) for name in _PACKAGES}
    if device == "CUDA GPU":
        peers = {name: _version(name) for name in _CUDA_PACKAGES}
        versions |= {name: version for name, version in peers.items() if version != _MISSING}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "chip": _chip(),
        "device": device,
        "cores": _cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": _system(),
        "python": platform.python_version(),
        "packages": versions,
        "commit": _commit(),
    }


def packages(about: dict[str, Any]) -> str:
    """The versions of what `describe` returned, as text."""
    return ", ".join(f"{name} {version}" for name, version in about["packages"].items())


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _device() -> str:
    if mx.default_device() == mx.cpu:
        return "CPU"
    return "Metal GPU" if mx.metal.is_available() else "CUDA GPU"


def _chip() -> str:
    if mx.default_device() != mx.cpu:
        name = mx.device_info().get("device_name")
        if name:
            return str(name)
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    system = f"{platform.system()} {platform.release()}"
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return f"{system}, NVIDIA driver {driver.split()[0]}" if driver else system


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _MISSING


def _commit() -> str:
    """The commit of the source checkout, marked when the tree has changes; "" when installed."""
    here = str(Path(__file__).resolve().parent)
    commit = _output("git", "-C", here, "rev-parse", "--short", "HEAD")
    if commit and _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no"):
        commit += " with changes"
    return commit


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
