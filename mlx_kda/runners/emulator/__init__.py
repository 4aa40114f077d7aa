"""The emulator: runs the text MLX would hand to Apple's compiler on the CPU, and checks it.

How a call goes: ``call.py`` takes the arguments of ``mx.fast.metal_kernel``'s call; ``..text``
generates the Metal text; ``..rewrite`` turns it into C++, line for line; ``compiler.py`` builds it
against the stand-in for Metal's library (``include/``) and links the runtime (``runtime/``);
``launch.py`` runs it.
The runtime runs every thread as a fiber: SIMD operations wait for the SIMD-group's lanes, barriers
for the threadgroup, threadgroups run one after another.

The checked build sees every load and store that the optimised kernel makes (-fsanitize=thread calls
a hook; the sanitizer itself is not linked). Races are found from the order that barriers establish,
not from the order in which threads happened to run. ``runtime/checked.cpp`` says what counts as
ordered; a write that does not change what the memory holds is never a race.

What it cannot show: the effects of caches and of Apple's memory model, register pressure and
occupancy, the GPU's watchdog, fast math, the accuracy of Apple's own functions (the C library's are
used here), and a load whose result is not used, which the compiler removes. A kernel whose
threadgroups wait for one another does not end.
"""

from .call import EmulatedKernel

__all__ = ["EmulatedKernel"]
