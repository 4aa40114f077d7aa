"""How far a converted model may be from its source: errors of weights, noise, and divergence."""

import math
import zlib
from dataclasses import dataclass, field

import mlx.core as mx

from ..weights.quantization import Quantization

SLICE = 1 << 24  # elements compared at a time
# Largest relative error of a weight by mode: about twice that of normally distributed weights in
# groups of 64; heavier tails come to 1.3 times that.
MODE_BOUNDS = {"mxfp4": 0.25, "nvfp4": 0.2, "mxfp8": 0.06}
ROUNDING = {mx.float32: 1e-7, mx.bfloat16: 4e-3, mx.float16: 1e-3}


def weight_bound(quantization: Quantization | None, kept: mx.Dtype, given: mx.Dtype) -> float:
    """The largest ``|W - W'| / |W|`` of a correct weight; ``kept`` and ``given`` are its dtypes."""
    if quantization is None:
        return 0.0 if kept == given else ROUNDING.get(kept, 0.0)
    if quantization.mode == "affine":
        return 3.2 / 2**quantization.bits + 0.004  # scales of 16 bits round too
    return MODE_BOUNDS[quantization.mode]


@dataclass
class FamilyError:
    """Errors of the weights of one family."""

    tensors: int = 0
    wrong: float = 0.0  # sum of squares of the differences
    total: float = 0.0  # sum of squares of the weights
    worst: str = ""
    worst_share: float = 0.0  # of its bound
    failed: list[str] = field(default_factory=list)

    @property
    def error(self) -> float:
        """``|W - W'| / |W|`` over the family."""
        return _relative(self.wrong, self.total)

    def add(self, name: str, wrong: float, total: float, bound: float) -> None:
        """Add one weight by the sums of squares of its difference and of itself."""
        self.tensors += 1
        self.wrong, self.total = self.wrong + wrong, self.total + total
        error = _relative(wrong, total)
        if not error <= bound:  # NaN fails too
            self.failed.append(f"{name} ({error:.3g} > {bound:.3g})")
        share = error / bound if bound else float(error > 0)
        if share >= self.worst_share:
            self.worst, self.worst_share = name, share


@dataclass
class Comparison:
    """What a comparison with the source found."""

    families: dict[str, FamilyError] = field(default_factory=dict)
    # unit -> relative error of the hidden states after it
    drift: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    kl: float = 0.0  # mean over tokens, in nats: KL(source | converted)
    kl_max: float = 0.0
    top1: float = 0.0  # share of tokens with the same top-1 prediction
    noise_kl: float = 0.0  # the same of the source with noise
    noise_top1: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)


def _relative(wrong: float, total: float) -> float:
    """``|W - W'| / |W|`` from the sums of squares; of a zero weight, ``|W'|``."""
    return math.sqrt(wrong / total) if total else math.sqrt(wrong)


def noisy(array: mx.array, error: float, seed: str) -> mx.array:
    """A weight in float32 plus normal noise of this root mean square, the same in every run."""
    if not error:
        return array
    noise = mx.random.normal(array.shape, key=mx.random.key(zlib.crc32(seed.encode())))
    return array.astype(mx.float32) + noise * error


def squares(given: mx.array, kept: mx.array) -> tuple[float, float]:
    """Sums of squares of the difference and of the first array."""
    wrong = total = 0.0
    first, second = given.reshape(-1), kept.reshape(-1)
    for start in range(0, first.size, SLICE):
        a, b = (x[start : start + SLICE].astype(mx.float32) for x in (first, second))
        sums = mx.stack([(a - b).square().sum(), a.square().sum()])
        mx.eval(sums)
        wrong, total = wrong + float(sums[0]), total + float(sums[1])
    return wrong, total


class Divergence:
    """KL(first | other) and top-1 agreement of some models' predictions, over a few tokens.

    Takes the logits some of the vocabulary at a time. With logits a of the first model and b of
    another, over the vocabulary v,

        KL = sum_v p_v (a_v - b_v) + lse(b) - lse(a),    p_v = exp(a_v - lse(a)),

    where lse is the logarithm of the sum of exponentials. The sums are carried from block to block,
    relative to the largest logit so far.
    """

    def __init__(self, tokens: int, others: int):
        low = mx.full((tokens,), -mx.inf)
        self._top = [low] * (others + 1)  # largest logit
        self._sum = [mx.zeros((tokens,))] * (others + 1)  # of exp(logit - largest)
        self._best = [mx.zeros((tokens,), dtype=mx.int32)] * (others + 1)  # where it is
        self._gap = [mx.zeros((tokens,))] * others  # sum of exp(a - largest a) (a - b)
        self._start = 0

    def add(self, logits: list[mx.array]) -> None:
        """Add the next block of the vocabulary: float32 [tokens, block] of each model."""
        first = logits[0]
        for model, x in enumerate(logits):
            top = mx.maximum(self._top[model], x.max(axis=-1))
            best = mx.argmax(x, axis=-1).astype(mx.int32) + self._start
            self._best[model] = mx.where(top > self._top[model], best, self._best[model])
            scale = mx.exp(self._top[model] - top)  # of the sums so far
            raised = mx.exp(x - top[:, None])
            self._sum[model] = self._sum[model] * scale + raised.sum(axis=-1)
            self._top[model] = top
            if model == 0:
                weights, old = raised, scale
            else:
                gap = (weights * (first - x)).sum(axis=-1)
                self._gap[model - 1] = self._gap[model - 1] * old + gap
        self._start += first.shape[-1]
        mx.eval(self._top, self._sum, self._best, self._gap)

    def found(self) -> list[tuple[float, float, float]]:
        """(mean KL, largest KL, share of tokens with the same top-1 prediction) of the others."""
        result = []
        for other, gap in enumerate(self._gap, start=1):
            rise = self._top[other] - self._top[0]  # added first: the logarithms are small
            rise = rise + mx.log(self._sum[other] / self._sum[0])
            kl = mx.maximum(gap / self._sum[0] + rise, 0)  # below 0 is rounding
            same = int((self._best[0] == self._best[other]).sum()) / kl.size
            result.append((float(kl.mean()), float(kl.max()), same))
        return result
