"""One planted fault: a kernel's body with it, and the corrected twin."""

from dataclasses import dataclass

import mlx.core as mx

N = 128  # elements; two threadgroups of 64 threads unless a case says otherwise


@dataclass
class Case:
    """A body with a fault on a line marked FAULT (a race has two ends), and its right twin."""

    kind: str
    bad: str
    good: str
    group: int = 64
    grid: int = N
    size: int = N
    out_dtype: mx.Dtype = mx.float32

    def lines(self):
        marked = {i for i, s in enumerate(self.bad.split("\n"), 1) if "FAULT" in s}
        return marked or {None}
