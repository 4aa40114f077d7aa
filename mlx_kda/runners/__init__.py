"""Run a Metal kernel on Apple's GPU, in an emulator on the CPU that checks it, or on CUDA.

Any kernel that ``mx.fast.metal_kernel`` takes runs here; docs/emulator.md shows how.
Names are loaded on first use, so that importing the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .counters import Counts, count, counting
    from .fault import KernelFault
    from .frontend import frontend_check
    from .kernel import MetalKernel, choose, metal_kernel

RUNNERS = ("auto", "metal", "cuda", "emulator", "emulator-fast", "emulator-count")

_HOME = {
    "Counts": "counters",
    "KernelFault": "fault",
    "MetalKernel": "kernel",
    "choose": "kernel",
    "count": "counters",
    "counting": "counters",
    "frontend_check": "frontend",
    "metal_kernel": "kernel",
}

__all__ = [
    "RUNNERS",
    "Counts",
    "KernelFault",
    "MetalKernel",
    "choose",
    "count",
    "counting",
    "frontend_check",
    "metal_kernel",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
