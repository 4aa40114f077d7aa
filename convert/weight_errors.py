"""How far a converted weight is from the source's, what its bits allow, and noise as large."""

import math
import zlib
from dataclasses import dataclass, field

import mlx.core as mx

SLICE = 1 << 24  # elements compared at a time
# Relative error of a weight that a packing may have: about twice what it has on normally
# distributed weights in groups of 64; heavier tails come to 1.3 times that.
MODE_BOUNDS = {"mxfp4": 0.25, "nvfp4": 0.2, "mxfp8": 0.06}
ROUNDING = {mx.float32: 1e-7, mx.bfloat16: 4e-3, mx.float16: 1e-3}


def weight_bound(packing: dict | None, kept: mx.Dtype, given: mx.Dtype) -> float:
    """The largest ``|W - W'| / |W|`` of a weight that is right."""
    if packing is None:
        return 0.0 if kept == given else ROUNDING.get(kept, 0.0)
    if packing["mode"] == "affine":
        return 3.2 / 2 ** packing["bits"] + 0.004  # scales of 16 bits round too
    return MODE_BOUNDS[packing["mode"]]


@dataclass
class FamilyError:
    """Errors of the weights of one family."""

    tensors: int = 0
    wrong: float = 0.0  # sums of squares
    total: float = 0.0
    worst: str = ""
    worst_share: float = 0.0  # of its bound
    failed: list[str] = field(default_factory=list)

    @property
    def error(self) -> float:
        """``|W - W'| / |W|`` over the family."""
        return _relative(self.wrong, self.total)

    def add(self, name: str, wrong: float, total: float, bound: float) -> None:
        """Count one weight: the sums of squares of its difference and of itself."""
        self.tensors += 1
        self.wrong, self.total = self.wrong + wrong, self.total + total
        error = _relative(wrong, total)
        if not error <= bound:  # NaN fails too
            self.failed.append(f"{name} ({error:.3g} > {bound:.3g})")
        share = error / bound if bound else float(error > 0)
        if share >= self.worst_share:
            self.worst, self.worst_share = name, share


def _relative(wrong: float, total: float) -> float:
    """``|W - W'| / |W|`` from the sums of squares; of a zero weight, ``|W'|``."""
    return math.sqrt(wrong / total) if total else math.sqrt(wrong)


def noisy(array: mx.array, error: float, seed: str) -> mx.array:
    """A weight in float32 with normal noise of a root mean square, the same in every run."""
    if not error:
        return array
    noise = mx.random.normal(array.shape, key=mx.random.key(zlib.crc32(seed.encode())))
    return array.astype(mx.float32) + noise * error


def squares(given: mx.array, kept: mx.array) -> tuple[float, float]:
    """Sums of squares of the difference and of the first, a slice at a time."""
    wrong = total = 0.0
    first, second = given.reshape(-1), kept.reshape(-1)
    for start in range(0, first.size, SLICE):
        a, b = (x[start : start + SLICE].astype(mx.float32) for x in (first, second))
        sums = mx.stack([(a - b).square().sum(), a.square().sum()])
        mx.eval(sums)
        wrong, total = wrong + sums[0].item(), total + sums[1].item()
    return wrong, total
