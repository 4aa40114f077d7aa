"""A converted model beside its source: errors of the weights, and logits, a layer at a time.

Both models are computed in float32 from their own weights, the converted one's dequantised, so
that the difference is that of the weights and of nothing else. In memory are one layer's weights
without its experts, one expert, or some rows of the embedding or the head, for both models.

How far logits may move depends on the model: one that was never trained is thrown off by little. So
a third model is computed beside the two, the source with random noise added, in each weight as much
as the converted one differs. Rounding that is right does about what this noise does.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import CheckpointError
from ..layers import RMSNorm
from ..models.hybrid import DecoderLayer
from ..models.tensor_roles import tensor_family
from ..weights.weight_mapping import Progress
from .divergence import Divergence
from .layout import Layout
from .routed import Routed
from .side import EMBEDDING, HEAD, NORM, Side, Weights
from .weight_errors import FamilyError, noisy, squares, weight_bound
from .weights import LAYERS, plain_shapes, units

MODELS = 3  # the source, the converted one, the source with noise


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

    Both layouts must make the same names and shapes; raises CheckpointError where they do not.
    `progress` hears bytes of the source.
    """
    result = Comparison(tokens=tokens.size)
    check_shapes(source, out)
    places = units(source), units(out)
    if missing := places[0].keys() ^ places[1].keys():
        raise CheckpointError(f"only one of the two models has {sorted(missing)[0]}")
    sides = Side(source, places[0], hashed=True), Side(out, places[1], hashed=False)
    with sides[0].reader, sides[1].reader:
        pair = Pair(result, *sides)
        hidden = [tokens] * MODELS
        total = sum(spec.nbytes for spec in source.mapping.outputs.values())
        done = 0
        for unit, steps in places[0].items():
            if progress:
                progress(done, total, f"comparing {unit}")
            done += sum(step.nbytes for step in steps)
            if unit == HEAD:
                pair.head(hidden, unit)
                continue
            hidden = pair.embedding(tokens) if unit == EMBEDDING else pair.unit(unit, hidden)
            result.drift[unit] = _relative(*hidden[:2])
            mx.clear_cache()
        if source.config.tie_word_embeddings:
            pair.head(hidden, EMBEDDING)
        result.digests = sides[0].reader.digests | sides[0].rows.digests
    return result


def check_shapes(source: Layout, out: Layout) -> None:
    """Raise CheckpointError where a weight of the source has another shape in the output."""
    shapes = [plain_shapes(layout.mapping) for layout in (source, out)]
    for name, shape in shapes[0].items():
        if (other := shapes[1].get(name, shape)) != shape:
            raise CheckpointError(
                f"{source.source.name} is another model: its {name} has shape {list(shape)}, the "
                f"output's {list(other)}"
            )


class Pair:
    """The two models side by side; counts the errors of every weight that it reads."""

    def __init__(self, result: Comparison, given: Side, kept: Side):
        self.result, self.given, self.kept = result, given, kept
        self.counted: set[str] = set()

    def embedding(self, tokens: mx.array) -> list[mx.array]:
        """Ids [B, T] -> hidden states [B, T, hidden] of each model."""
        ids = np.array(tokens).reshape(-1)
        hidden: list[list] = [[] for _ in range(MODELS)]
        found = []
        for start, _, weights in self.by_rows(EMBEDDING):
            at = np.nonzero((ids >= start) & (ids < start + weights[0].shape[0]))[0]
            found.append(at)
            for states, weight in zip(hidden, weights, strict=True):
                states.append(weight[mx.array(ids[at] - start)].astype(mx.float32))
            mx.eval([states[-1] for states in hidden])
        order = mx.array(np.argsort(np.concatenate(found)))
        return [mx.concatenate(s)[order].reshape(*tokens.shape, -1) for s in hidden]

    def head(self, hidden: list[mx.array], path: str) -> None:
        """Compare the distributions of the next token."""
        rows = [h.reshape(-1, h.shape[-1]) for h in hidden]
        divergence = Divergence(rows[0].shape[0], MODELS - 1)
        for _, _, weights in self.by_rows(path):
            divergence.add([h @ w.astype(mx.float32).T for h, w in zip(rows, weights, strict=True)])
        (kl, kl_max, top1), (noise, _, noise_top1) = divergence.found()
        self.result.kl, self.result.kl_max, self.result.top1 = kl, kl_max, top1
        self.result.noise_kl, self.result.noise_top1 = noise, noise_top1

    def unit(self, unit: str, hidden: list[mx.array]) -> list[mx.array]:
        """A layer, or the last norm: [B, T, hidden] -> the same of each model."""
        given, kept = self.given.small(unit), self.kept.small(unit)
        errors = self.count(given, kept)
        routed = Routed(self.given.layout.config) if self.given.experts[unit] else None
        states = [
            self._run(unit, given, hidden[0], routed),
            self._run(unit, kept, hidden[1], routed),
        ]
        del kept
        noise = {name: noisy(array, errors[name], name) for name, array in given.items()}
        states.append(self._run(unit, noise, hidden[2], routed))
        if routed is None:
            return states
        for expert, weights in self._experts(unit):
            routed.add(expert, weights)
        return [h + y for h, y in zip(states, routed.outputs(), strict=True)]

    def _run(self, unit: str, weights: Weights, h: mx.array, routed: Routed | None) -> mx.array:
        """One unit in float32, its routed experts left out and kept for later."""
        config = self.given.layout.config
        if unit == NORM:
            norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            _load(norm, weights, unit)
            h = norm(h)
        else:
            layer = DecoderLayer(config, int(unit.removeprefix(LAYERS)))
            if routed is not None:
                layer.mlp.switch_mlp = routed
            _load(layer, weights, unit)
            h = layer(h, "causal")
            if routed is not None:
                routed.keep(layer.mlp)
        mx.eval(h)
        return h

    def _experts(self, unit: str) -> Iterator[tuple[int, list[list[mx.array]]]]:
        """(number, the three matrices of each model) of every expert of a layer."""
        paths = self.given.experts[unit]
        if paths != self.kept.experts[unit]:
            raise CheckpointError(f"only one of the two models has all experts of {unit}")
        for parts in zip(*(self.by_rows(path, 1) for path in paths), strict=True):
            number = parts[0][0]
            yield number, [[weights[m][0] for *_, weights in parts] for m in range(MODELS)]

    def by_rows(self, path: str, at_a_time: int | None = None) -> Iterator[tuple]:
        """(start, stop, rows of each model) of a weight; at the end its error is counted."""
        name, wrong, total = f"{path}.weight", 0.0, 0.0
        for start, stop in self.given.rows.blocks(path, at_a_time):
            given, kept = self.given.rows(path, start, stop), self.kept.rows(path, start, stop)
            sums = squares(given, kept)
            wrong, total = wrong + sums[0], total + sums[1]
            noise = noisy(given, math.sqrt(sums[0] / given.size), f"{name} {start}")
            yield start, stop, [given, kept, noise]
        self._count(name, wrong, total, given.dtype, kept.dtype)

    def count(self, given: Weights, kept: Weights) -> dict[str, float]:
        """Count the weights of a unit by family; name -> root mean square of the difference."""
        if given.keys() != kept.keys():
            name = sorted(given.keys() ^ kept.keys())[0]
            raise CheckpointError(f"only one of the two models has {name}")
        errors = {}
        for name, array in given.items():
            wrong, total = squares(array, kept[name])
            self._count(name, wrong, total, array.dtype, kept[name].dtype)
            errors[name] = math.sqrt(wrong / array.size)
        return errors

    def _count(
        self, name: str, wrong: float, total: float, given: mx.Dtype, kept: mx.Dtype
    ) -> None:
        if name in self.counted:  # a tied embedding is read twice
            return
        self.counted.add(name)
        packing = self.kept.layout.mapping.quantized.get(name.removesuffix(".weight"))
        family = self.result.families.setdefault(tensor_family(name), FamilyError())
        family.add(name, wrong, total, weight_bound(packing, kept, given))


def _load(module: nn.Module, weights: Weights, unit: str) -> None:
    cut = len(unit) + 1
    module.load_weights([(name[cut:], w.astype(mx.float32)) for name, w in weights.items()])
    module.eval()


def _relative(given: mx.array, kept: mx.array) -> float:
    return math.sqrt(((given - kept).square().sum() / given.square().sum()).item())
