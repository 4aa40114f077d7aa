"""Memory of a process: what the system counts as resident, and MLX arrays.

    python benchmarks/memory.py FILE MODULE ARGUMENTS

runs a module as ``python -m MODULE ARGUMENTS`` does and writes its highest resident bytes to FILE.
"""

import atexit
import gc
import os
import resource
import runpy
import subprocess
import sys
from pathlib import Path

import mlx.core as mx


def resident() -> int:
    """Bytes of this process in memory now."""
    if sys.platform == "darwin":
        shown = subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())])
        return int(shown) * 1024
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_resident() -> int:
    """Highest resident bytes of this process so far.

    Not ru_maxrss on Linux: a child inherits that of the process that started it.
    """
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def live_arrays() -> int:
    """MLX arrays that Python holds."""
    gc.collect()
    return sum(isinstance(one, mx.array) for one in gc.get_objects())


if __name__ == "__main__":
    file, module = Path(sys.argv[1]), sys.argv[2]
    atexit.register(lambda: file.write_text(str(peak_resident())))
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
