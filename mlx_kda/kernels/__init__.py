"""Metal kernels and what runs them: Apple's GPU, an emulator on the CPU, or CUDA."""

from .fault import KernelFault
from .runner import MetalKernel, choose, metal_kernel, resolve

__all__ = ["KernelFault", "MetalKernel", "choose", "metal_kernel", "resolve"]
