"""What a kernel asks of a GPU, counted by the emulator, and a model of the cycles it would take.

An operation counts once per SIMD-group that executes it, however many lanes take part; memory is
counted in bytes. Integer arithmetic is not counted. Arithmetic is counted as the source writes it;
loads are counted after the compiler has dropped those of what a thread already holds, across SIMD
operations too, as a GPU's compiler does. That takes g++ on x86-64: elsewhere such loads count
again. The cycles are a model (see ``Counts.alu_cycles``) and no measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kernel import MetalKernel

_MATRIX16 = 7  # place of the runtime's counter that Counts leaves out

# Cycles of one of a core's four schedulers for an instruction of a SIMD-group: public
# microbenchmarks of M1-class cores. A division is a reciprocal and a multiplication.
CYCLES = {
    "fma": 1,
    "add": 1,
    "mul": 1,
    "minmax": 1,
    "compare": 1,
    "convert": 1,
    "division": 5,
    "special": 4,
    "shuffles": 2,
    "simd_votes": 2,
    "simd_sums": 14.5,
    "simd_scans": 14.5,
    "mma": 18,
}
SCHEDULERS = 4
L1_BYTES_PER_CYCLE = 64
MODEL = "cycles of one GPU core by a model of M1-class cores, not a measurement"


@dataclass(frozen=True)
class Counts:
    """Counts of one launch, of several added up, or a fraction of them.

    Attributes (instructions of SIMD-groups unless they say bytes):
        fma, add, mul, division, minmax, compare: float arithmetic; a product added to something in
            the same expression is one fma.
        special: exp, log, rsqrt, sqrt and the like.
        convert: 16-bit floats loaded or stored outside matrix operations.
        mma: 8 x 8 x 8 matrix multiply-accumulates.
        shuffles, simd_sums (and minima, maxima, products), simd_scans, simd_votes.
        simd_barriers, barriers: barriers of a SIMD-group, of the threadgroup (for each SIMD-group).
        device_bytes: bytes requested of device memory; an instruction of a SIMD-group requests each
            byte once. device_lane_bytes: the same, for each lane.
        unique_read, unique_written: bytes of the buffers that the launch touches at all.
        constant_bytes: requested of inputs below 8 elements.
        threadgroup_bytes: requested of threadgroup memory.
        threadgroup_memory: bytes that a threadgroup allocates.
    """

    # In the order of runtime/count.cpp.
    fma: float = 0
    add: float = 0
    mul: float = 0
    division: float = 0
    minmax: float = 0
    compare: float = 0
    special: float = 0
    convert: float = 0
    mma: float = 0
    shuffles: float = 0
    simd_sums: float = 0
    simd_scans: float = 0
    simd_votes: float = 0
    simd_barriers: float = 0
    barriers: float = 0
    device_bytes: float = 0
    device_lane_bytes: float = 0
    unique_read: float = 0
    unique_written: float = 0
    constant_bytes: float = 0
    threadgroup_bytes: float = 0
    device_accesses: float = 0
    threadgroup_accesses: float = 0
    threadgroups: float = 0
    simdgroups: float = 0
    threadgroup_memory: int = 0

    def __add__(self, other: Counts) -> Counts:
        """The sum of both, and the larger threadgroup_memory."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        sums["threadgroup_memory"] = max(self.threadgroup_memory, other.threadgroup_memory)
        return Counts(**sums)

    def per(self, n: float) -> Counts:
        """The counts divided by ``n``, the rows for example; threadgroup_memory is kept."""
        shares = {f.name: getattr(self, f.name) / n for f in fields(self)}
        shares["threadgroup_memory"] = self.threadgroup_memory
        return Counts(**shares)

    @property
    def alu_cycles(self) -> float:
        """Model: core-cycles of arithmetic, shuffles and matrix operations on four schedulers."""
        return sum(getattr(self, name) * c for name, c in CYCLES.items()) / SCHEDULERS

    @property
    def l1_cycles(self) -> float:
        """Model: core-cycles to move device_bytes at 64 bytes per cycle."""
        return self.device_bytes / L1_BYTES_PER_CYCLE

    @property
    def threadgroup_cycles(self) -> float:
        """Model: core-cycles to move threadgroup_bytes at 64 bytes per cycle."""
        return self.threadgroup_bytes / L1_BYTES_PER_CYCLE

    @property
    def cycles_overlapped(self) -> float:
        """Model: the larger of alu_cycles and l1_cycles, a lower bound."""
        return max(self.alu_cycles, self.l1_cycles)

    @property
    def cycles_serial(self) -> float:
        """Model: alu_cycles and l1_cycles added, no overlap."""
        return self.alu_cycles + self.l1_cycles

    @classmethod
    def of_launch(cls, counters: Sequence[int], threadgroup_memory: int) -> Counts:
        """From the runtime's counters and the bytes that a threadgroup allocated."""
        names = [f.name for f in fields(cls) if f.name != "threadgroup_memory"]
        values = [*counters[:_MATRIX16], *counters[_MATRIX16 + 1 :]]
        named: dict[str, Any] = dict(zip(names, values, strict=False))
        return cls(**named, threadgroup_memory=threadgroup_memory)


Log = list[tuple[str, Counts]]
_logs: list[Log] = []


@contextmanager
def counting() -> Iterator[Log]:
    """Collect (kernel name, Counts) of every launch with ``runner="emulator-count"`` inside.

    >>> with counting() as log:
    ...     y = layer(x)
    >>> sum((counts for _, counts in log), Counts()).per(rows)
    """
    log: Log = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs[:] = [other for other in _logs if other is not log]  # equal ones stay


def note_launch(name: str, counters: Sequence[int], threadgroup_memory: int) -> None:
    """Called by the emulator after each counted launch."""
    for log in _logs:
        log.append((name, Counts.of_launch(counters, threadgroup_memory)))


def count(kernel: MetalKernel, **call: Any) -> Counts:
    """The counts of one call of a kernel made by ``metal_kernel``, whatever its runner.

    ``call`` are the arguments of the call: inputs, template, grid, threadgroup, ...
    """
    with counting() as log:
        kernel(**call, runner="emulator-count")
    return log[0][1]
