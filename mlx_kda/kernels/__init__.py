"""Metal kernels and what runs them: Apple's GPU, an emulator on the CPU, or CUDA."""

from .counts import Counts, count, counting
from .fault import KernelFault
from .frontend import frontend_check
from .runner import MetalKernel, choose, metal_kernel, resolve

__all__ = [
    "Counts",
    "KernelFault",
    "MetalKernel",
    "choose",
    "count",
    "counting",
    "frontend_check",
    "metal_kernel",
    "resolve",
]
