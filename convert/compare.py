"""A converted model beside its source, layer by layer: errors of the weights, and logits.

Both models are computed in float32 from their own weights, dequantised, so that only the weights
differ. In memory are one layer's weights without its experts, one expert, or some rows of the
embedding or the head, for both models.

How far logits may move depends on the model: those of an untrained one move far for little. So a
third model is computed beside the two: the source with random noise added, in each weight as much
as the converted one differs. Correct rounding does about what this noise does.
"""

import math
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import CheckpointError
from ..layers import RMSNorm
from ..models.hybrid import DecoderLayer
from ..models.tensor_roles import tensor_family
from ..weights.weight_mapping import Progress
from .compare_errors import Comparison, Divergence, FamilyError, noisy, squares, weight_bound
from .compare_weights import EMBEDDING, HEAD, LAYERS, NORM, ModelWeights, Weights
from .conversion_plan import ConversionPlan

MODELS = 3  # the source, the converted one, the source with noise


def compare(
    source: ConversionPlan, out: ConversionPlan, tokens: mx.array, progress: Progress | None = None
) -> Comparison:
    """Compare a converted model with its source on token ids [B, T].

    ``progress`` is called with the bytes of the source. Raises CheckpointError where the two models
    do not have the same weights of the same shapes.
    """
    result = Comparison(tokens=tokens.size)
    given, kept = ModelWeights(source, hashed=True), ModelWeights(out, hashed=False)
    for name, shape in given.shapes.items():
        if (other := kept.shapes.get(name, shape)) != shape:
            raise CheckpointError(
                f"{source.source.name} is another model: its {name} has shape {list(shape)}, the "
                f"output's {list(other)}"
            )
    if missing := given.units.keys() ^ kept.units.keys():
        raise CheckpointError(f"only one of the two models has {sorted(missing)[0]}")
    with given.reader, kept.reader:
        pair = _Pair(result, given, kept)
        hidden = [tokens] * MODELS
        total = sum(spec.nbytes for spec in source.mapping.outputs.values())
        done = 0
        for unit, steps in given.units.items():
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
        result.digests = given.digests
    return result


class _Pair:
    """The models side by side; adds up the errors of every weight that it reads."""

    def __init__(self, result: Comparison, given: ModelWeights, kept: ModelWeights):
        self.result, self.given, self.kept = result, given, kept
        self.config = given.plan.config
        self.counted: set[str] = set()

    def embedding(self, tokens: mx.array) -> list[mx.array]:
        """Ids [B, T] -> hidden states [B, T, hidden] of each model."""
        ids = np.array(tokens).reshape(-1)
        hidden: list[list[mx.array]] = [[] for _ in range(MODELS)]
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
        if given.keys() != kept.keys():
            name = sorted(given.keys() ^ kept.keys())[0]
            raise CheckpointError(f"only one of the two models has {name}")
        noise: Weights = {}
        for name, array in given.items():
            wrong, total = squares(array, kept[name])
            self._count(name, wrong, total, array.dtype, kept[name].dtype)
            noise[name] = noisy(array, math.sqrt(wrong / array.size), name)
        experts = _DeferredExperts(self.config.hidden_size) if self.given.experts[unit] else None
        states = []
        for weights, h in zip((given, kept, noise), hidden, strict=True):
            states.append(self._run(unit, weights, h, experts))
        if experts is None:
            return states
        for expert, matrices in self._experts(unit):
            experts.add(expert, matrices)
        return [h + y for h, y in zip(states, experts.outputs(), strict=True)]

    def _run(
        self, unit: str, weights: Weights, h: mx.array, experts: "_DeferredExperts | None"
    ) -> mx.array:
        """One unit in float32, without what its routed experts add."""
        if unit == NORM:
            norm = RMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)
            _load(norm, weights, unit)
            h = norm(h)
        else:
            layer = DecoderLayer(self.config, int(unit.removeprefix(LAYERS)))
            if experts is not None:
                layer.mlp.update_modules({"switch_mlp": experts})
            _load(layer, weights, unit)
            h = layer(h, "causal")
            if experts is not None:
                experts.keep(layer.mlp)
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

    def by_rows(
        self, path: str, at_a_time: int | None = None
    ) -> Iterator[tuple[int, int, list[mx.array]]]:
        """(start, stop, rows of each model) of a weight; at the end its error is counted."""
        name, wrong, total = f"{path}.weight", 0.0, 0.0
        for start, stop in self.given.blocks(path, at_a_time):
            given, kept = self.given.rows(path, start, stop), self.kept.rows(path, start, stop)
            sums = squares(given, kept)
            wrong, total = wrong + sums[0], total + sums[1]
            noise = noisy(given, math.sqrt(sums[0] / given.size), f"{name} {start}")
            yield start, stop, [given, kept, noise]
        self._count(name, wrong, total, given.dtype, kept.dtype)

    def _count(
        self, name: str, wrong: float, total: float, given: mx.Dtype, kept: mx.Dtype
    ) -> None:
        if name in self.counted:  # a tied embedding is read twice
            return
        self.counted.add(name)
        how = self.kept.plan.mapping.quantized.get(name.removesuffix(".weight"))
        family = self.result.families.setdefault(tensor_family(name), FamilyError())
        family.add(name, wrong, total, weight_bound(how, kept, given))


class _DeferredExperts(nn.Module):
    """Takes the place of a layer's routed experts, which are computed one by one afterwards."""

    def __init__(self, width: int):
        super().__init__()
        self._width = width
        self._inputs: list[mx.array] = []  # of each model [N, hidden]
        self._weights: list[mx.array] = []  # [N, k]
        self._chosen: list[np.ndarray] = []  # [N, k]
        self._outputs: list[mx.array] = []  # [N, hidden]

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """Zeros for now: x [..., hidden], chosen [..., k] -> [..., k, hidden]."""
        self._seen = x
        return mx.zeros((*chosen.shape, self._width))

    def keep(self, moe: nn.Module) -> None:
        """Keep what the experts of a layer, which has just run, are to compute."""
        x = self._seen
        chosen, weights = moe.route(moe.gate(x), x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        mx.eval(rows, chosen, weights)
        self._inputs.append(rows)
        self._weights.append(weights.reshape(rows.shape[0], -1))
        self._chosen.append(np.array(chosen).reshape(rows.shape[0], -1))
        self._outputs.append(mx.zeros(rows.shape))

    def add(self, expert: int, models: list[list[mx.array]]) -> None:
        """Add what one expert, (gate, up, down) of each model, makes of the tokens sent to it."""
        for model, matrices in enumerate(models):
            at, place = np.nonzero(self._chosen[model] == expert)
            if not at.size:
                continue
            gate, up, down = (w.astype(mx.float32).T for w in matrices)
            rows = mx.array(at)
            x, weights = self._inputs[model][rows], self._weights[model][rows, mx.array(place)]
            y = (nn.silu(x @ gate) * (x @ up)) @ down
            self._outputs[model][rows] += weights[:, None] * y
        mx.eval(self._outputs)
        mx.clear_cache()

    def outputs(self) -> list[mx.array]:
        """What the experts add to the hidden states of each model."""
        return [y.reshape(self._seen.shape) for y in self._outputs]


def _load(module: nn.Module, weights: Weights, unit: str) -> None:
    cut = len(unit) + 1
    module.load_weights([(name[cut:], w.astype(mx.float32)) for name, w in weights.items()])
    module.eval()


def _relative(given: mx.array, kept: mx.array) -> float:
    return math.sqrt(float((given - kept).square().sum() / given.square().sum()))
