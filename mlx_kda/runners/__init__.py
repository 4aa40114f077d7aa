"""What runs a Metal kernel: Apple's GPU, an emulator on the CPU that checks it, or CUDA.

It knows nothing of KDA: any kernel that `mx.fast.metal_kernel` takes runs here.
"""

from .counters import Counts, count, counting
from .fault import KernelFault
from .frontend import frontend_check
from .kernel import MetalKernel, choose, metal_kernel

__all__ = [
    "Counts",
    "KernelFault",
    "MetalKernel",
    "choose",
    "count",
    "counting",
    "frontend_check",
    "metal_kernel",
]
