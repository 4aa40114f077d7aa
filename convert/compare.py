"""A converted model beside its source: errors of the weights, and logits, a layer at a time.

Both models are computed in float32 from their own weights, the converted one's dequantised, so
that the difference is that of the weights and of nothing else. One unit's weights are in memory at
a time, for whichever model is computed.

How far logits may move depends on the model: one that was never trained is thrown off by little. So
a third model is computed beside the two, the source with random noise added, in each weight as much
as the converted one differs. Rounding that is right does about what this noise does.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from mlx_kda.errors import CheckpointError
from mlx_kda.layers import RMSNorm
from mlx_kda.models.hybrid import DecoderLayer

from .families import tensor_family
from .layout import Layout
from .reader import Reader
from .weights import LAYERS, plain_weights, unit_of, units

EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
ROWS = 64  # tokens whose logits are compared at a time
Progress = Callable[[int, int, str], None]

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
        return math.sqrt(self.wrong / self.total) if self.total else math.sqrt(self.wrong)

    def add(self, name: str, given: mx.array, kept: mx.array, bound: float) -> float:
        """Count one weight; the sum of squares of its difference."""
        wrong, total = _squares(given, kept)
        self.tensors += 1
        self.wrong, self.total = self.wrong + wrong, self.total + total
        error = math.sqrt(wrong / total) if total else math.sqrt(wrong)
        if not error <= bound:  # NaN fails too
            self.failed.append(f"{name} ({error:.3g} > {bound:.3g})")
        share = error / bound if bound else float(error > 0)
        if share >= self.worst_share:
            self.worst, self.worst_share = name, share
        return wrong


@dataclass
class Comparison:
    """What `compare` found."""

    families: dict[str, FamilyError] = field(default_factory=dict)
    # unit -> relative error of the hidden states after it
    drift: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    kl: float = 0.0  # mean over tokens, in nats: KL(source | converted)
    kl_max: float = 0.0
    top1: float = 0.0  # share of tokens whose likeliest next one is the same
    noise_kl: float = 0.0  # the same of the source with noise
    noise_top1: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)


def compare(
    source: Layout, out: Layout, tokens: mx.array, progress: Progress | None = None
) -> Comparison:
    """Compare a converted model with its source on token ids [B, T].

    Both layouts must make the same names; raises CheckpointError where one lacks a tensor.
    """
    result, places = Comparison(tokens=tokens.size), (units(source), units(out))
    if missing := places[0].keys() ^ places[1].keys():
        raise CheckpointError(f"only one of the two models has {sorted(missing)[0]}")
    order = [source.view.stored(s for steps in places[0].values() for s in steps)]
    order.append(out.view.stored(s for steps in places[1].values() for s in steps))
    with Reader(source.source, order[0]) as given, Reader(out.source, order[1]) as kept:
        hidden = [tokens] * 3
        embeddings: list[dict[str, mx.array]] = []
        for number, unit in enumerate(places[0]):
            if progress:
                progress(number, len(places[0]), unit)
            first = dict(plain_weights(places[0][unit], source.view, source.mapping.packed, given))
            second = dict(plain_weights(places[1][unit], out.view, out.mapping.packed, kept))
            errors = _errors(result, first, second, out)
            if unit == EMBEDDING and source.config.tie_word_embeddings:
                embeddings = [first, second, _noisy(first, errors)]
            if unit == HEAD:
                _logits(result, hidden, [first, second, _noisy(first, errors)])
                continue
            for place, weights in enumerate((first, second, None)):
                weights = _noisy(first, errors) if weights is None else weights
                hidden[place] = _forward(source.config, unit, weights, hidden[place])
            result.drift[unit] = _relative(*hidden[:2])
            del first, second, weights
            mx.clear_cache()
        if embeddings:
            _logits(result, hidden, embeddings)
        result.digests = given.digests
    return result


def _errors(result: Comparison, given: dict, kept: dict, out: Layout) -> dict[str, float]:
    """Count the weights of a unit by family; name -> root mean square of the difference."""
    if given.keys() != kept.keys():
        name = sorted(given.keys() ^ kept.keys())[0]
        raise CheckpointError(f"only one of the two models has {name}")
    errors = {}
    for name, array in given.items():
        other, packing = kept[name], out.mapping.packed.get(name.removesuffix(".weight"))
        bound = weight_bound(packing, other.dtype, array.dtype)
        family = result.families.setdefault(tensor_family(name), FamilyError())
        wrong = family.add(name, array, other, bound)
        errors[name] = math.sqrt(wrong / array.size)
    return errors


def _noisy(weights: dict[str, mx.array], errors: dict[str, float]) -> dict[str, mx.array]:
    """The weights with normal noise of the given root mean squares, the same in every run."""
    noisy = {}
    for name, array in weights.items():
        key = mx.random.key(zlib.crc32(name.encode()))
        noise = mx.random.normal(array.shape, key=key) * errors[name]
        noisy[name] = array.astype(mx.float32) + noise if errors[name] else array
    return noisy


def _squares(given: mx.array, kept: mx.array) -> tuple[float, float]:
    """Sums of squares of the difference and of the first, a slice at a time."""
    wrong = total = 0.0
    for a, b in zip(_slices(given), _slices(kept), strict=True):
        a, b = a.astype(mx.float32), b.astype(mx.float32)
        sums = mx.stack([(a - b).square().sum(), a.square().sum()])
        mx.eval(sums)
        wrong, total = wrong + sums[0].item(), total + sums[1].item()
    return wrong, total


def _slices(array: mx.array, size: int = 1 << 24) -> Iterator[mx.array]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, size):
        yield flat[start : start + size]


def _forward(config: object, unit: str, weights: dict[str, mx.array], h: mx.array) -> mx.array:
    """One unit of the model in float32: [B, T] ids or [B, T, hidden] -> [B, T, hidden]."""
    if unit == EMBEDDING:
        h = weights[f"{unit}.weight"].astype(mx.float32)[h]
    elif unit == NORM:
        norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        _load(norm, weights, unit)
        h = norm(h)
    else:
        layer = DecoderLayer(config, int(unit.removeprefix(LAYERS)))
        _load(layer, weights, unit)
        h = layer(h, "causal")
    mx.eval(h)
    return h


def _load(module: nn.Module, weights: dict[str, mx.array], unit: str) -> None:
    cut = len(unit) + 1
    module.load_weights([(name[cut:], w.astype(mx.float32)) for name, w in weights.items()])
    module.eval()


def _logits(result: Comparison, hidden: list, weights: list[dict[str, mx.array]]) -> None:
    """Compare the distributions of the next token with the source's, some tokens at a time."""
    heads = [next(iter(w.values())).astype(mx.float32).T for w in weights]
    rows = [h.reshape(-1, h.shape[-1]) for h in hidden]
    kl: list[list[float]] = [[], []]
    same = [0, 0]
    for start in range(0, rows[0].shape[0], ROWS):
        logits = [h[start : start + ROWS] @ head for h, head in zip(rows, heads, strict=True)]
        given, *others = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in logits)
        likeliest = mx.argmax(given, axis=-1)
        for place, other in enumerate(others):
            distance = (mx.exp(given) * (given - other)).sum(axis=-1)
            agree = (likeliest == mx.argmax(other, axis=-1)).sum()
            kl[place] += mx.maximum(distance, 0).tolist()  # below 0 is rounding
            same[place] += agree.item()
    count = len(kl[0])
    result.kl, result.kl_max, result.top1 = sum(kl[0]) / count, max(kl[0]), same[0] / count
    result.noise_kl, result.noise_top1 = sum(kl[1]) / count, same[1] / count


def _relative(given: mx.array, kept: mx.array) -> float:
    return math.sqrt(((given - kept).square().sum() / given.square().sum()).item())


__all__ = ["Comparison", "FamilyError", "compare", "unit_of", "weight_bound"]
