"""One planted fault: a kernel's body with it, and the corrected twin."""

from dataclasses import dataclass

import mlx.core as mx

N = 128  # elements; two threadgroups of 64 threads unless a case says otherwise


@dataclass
class Case:
    """A body as a diff: ``-`` lines only in the wrong kernel, ``+`` lines only in the right one.

    The emulator is to report a line marked FAULT; a race has two ends.
    """

    kind: str
    diff: str
    group: int = 64
    grid: int = N
    size: int = N
    out_dtype: mx.Dtype = mx.float32

    @property
    def bad(self) -> str:
        return self._side("+")

    @property
    def good(self) -> str:
        return self._side("-")

    def lines(self) -> set[int | None]:
        marked = {i for i, s in enumerate(self.bad.split("\n"), 1) if "FAULT" in s}
        return marked or {None}

    def _side(self, other: str) -> str:
        lines = [line.strip() for line in self.diff.split("\n")]
        return "\n".join(line.lstrip("+-") for line in lines if not line.startswith(f"{other} "))
