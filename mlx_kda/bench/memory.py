"""Resident memory of a process, as the system counts it.

    python -m mlx_kda.bench.memory FILE MODULE ARGUMENTS

runs a module as ``python -m MODULE ARGUMENTS`` would and leaves its highest resident bytes in FILE.
"""

import atexit
import os
import resource
import runpy
import subprocess
import sys
from pathlib import Path


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


if __name__ == "__main__":
    file, module = Path(sys.argv[1]), sys.argv[2]
    atexit.register(lambda: file.write_text(str(peak_resident())))
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
