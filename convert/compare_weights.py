"""The weights of a model that is compared, dequantised as they are read: by unit, or by rows.

A unit is the embedding, a layer, the last norm or the head. Its large weights (embedding, head,
stacks of experts) are read some rows at a time: a layer of Kimi Linear 48B holds 7 GB of experts in
float32, one expert 28 MB.
"""

import hashlib
from collections.abc import Iterable, Iterator

import mlx.core as mx
import numpy as np

from ..weights.quantization import dequantize
from ..weights.safetensors import Read, as_array, read_bytes, rows_of
from ..weights.source import Reader
from ..weights.source_view import DerivedTensor
from ..weights.weight_mapping import Step, WeightMapping
from .conversion_plan import ConversionPlan

LAYERS = "model.layers."
EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
BLOCK = 1 << 24  # elements read at a time
PARTS = ("weight", "scales", "biases")

Weights = dict[str, mx.array]


class ModelWeights:
    """The weights of one model, quantised ones dequantised to float32, others in their dtype.

    Args:
        plan: of a source, or of a converted folder.
        hashed: whether ``digests`` gets the SHA-256 of every stored tensor that is read whole, or
            by rows from the first to the last.
    """

    def __init__(self, plan: ConversionPlan, hashed: bool):
        self.plan = plan
        self._view, self._quantized = plan.view, plan.mapping.quantized
        self._steps = {name: step for step in plan.mapping.steps for name in step.outputs}
        # unit -> its steps, in the order of the model
        self.units: dict[str, list[Step]] = {}
        for step in plan.mapping.steps:
            if step.outputs:
                self.units.setdefault(unit_of(next(iter(step.outputs))), []).append(step)
        # unit -> paths of the stacked weights of its routed experts
        self.experts = {
            unit: [path for path in _expert_paths(unit) if f"{path}.weight" in self._steps]
            for unit in self.units
        }
        self.shapes = plain_shapes(plan.mapping)
        self._hashed = hashed
        self._hashing: dict[str, tuple[int, hashlib._Hash]] = {}  # rows hashed so far
        self._row_digests: dict[str, str] = {}
        self._whole: Weights = {}
        self.reader = Reader(plan.source, self._order())

    @property
    def digests(self) -> dict[str, str]:
        """Stored tensor -> SHA-256, of those read so far."""
        return self.reader.digests | self._row_digests

    def small(self, unit: str) -> Weights:
        """The weights of a unit, without those that are read by rows."""
        return dict(self.of_steps(self._small_steps(unit)))

    def of_steps(self, steps: Iterable[Step]) -> Iterator[tuple[str, mx.array]]:
        """(name, array) of the weights that some steps make."""
        read = self._view.reading(self.reader)
        parts: dict[str, Weights] = {}
        for step in steps:
            for name, array in step.run(read).items():
                path, _, part = name.rpartition(".")
                if not is_quantized(self.plan.mapping, name):
                    yield name, array
                    continue
                held = parts.setdefault(path, {})
                held[part] = array
                if all(f"{path}.{p}" not in self._steps or p in held for p in PARTS):
                    del parts[path]
                    yield f"{path}.weight", self._dequantize(path, held)

    def blocks(self, path: str, at_a_time: int | None = None) -> Iterator[tuple[int, int]]:
        """(start, stop) of all rows of a weight, in blocks of about ``BLOCK`` elements."""
        rows, *others = self.shapes[f"{path}.weight"]
        step = at_a_time or max(1, BLOCK // int(np.prod(others)))
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def rows(self, path: str, start: int, stop: int) -> mx.array:
        """Rows of a weight, [stop - start, ...]."""
        names = [part for part in PARTS if f"{path}.{part}" in self._steps]
        parts = {part: self._rows(f"{path}.{part}", start, stop) for part in names}
        return self._dequantize(path, parts) if path in self._quantized else parts["weight"]

    def _dequantize(self, path: str, parts: Weights) -> mx.array:
        arrays = [parts[part] for part in ("weight", "scales", "biases") if part in parts]
        return dequantize(arrays, self._quantized[path], mx.float32)

    def _small_steps(self, unit: str) -> list[Step]:
        large = unit in (EMBEDDING, HEAD)
        return [
            step
            for step in self.units[unit]
            if not large and ".mlp.switch_mlp." not in next(iter(step.outputs))
        ]

    def _order(self) -> Iterator[str]:
        """Stored tensors that are read whole, in the order of reading."""
        for unit in self.units:
            yield from self._view.stored(self._small_steps(unit))
            if unit in (EMBEDDING, HEAD):
                for start, stop in self.blocks(unit):
                    yield from self._stored(unit, start, stop)
            if paths := self.experts[unit]:
                for start, stop in self.blocks(paths[0], 1):
                    for path in paths:
                        yield from self._stored(path, start, stop)

    def _stored(self, path: str, start: int, stop: int) -> list[str]:
        """The stored tensors that are read whole for these rows, in order."""
        names: list[str] = []
        for part in PARTS:
            step = self._steps.get(f"{path}.{part}")
            if step is None or self._by_rows(step):
                continue
            taken = step.sources[start:stop] if step.pieces else step.sources if not start else ()
            names += self._view.stored_of(taken)
        return names

    def _by_rows(self, step: Step) -> bool:
        """Whether a row of what the step makes needs only the same row of its sources."""
        tensors = [self._view.tensors[name] for name in step.sources]
        return step.by_rows and all(not isinstance(t, DerivedTensor) or t.by_rows for t in tensors)

    def _rows(self, name: str, start: int, stop: int) -> mx.array:
        step = self._steps[name]
        if self._by_rows(step):
            return step.run(self._view.reading(self._reading(start, stop)))[name]
        read = self._view.reading(self.reader)
        if step.pieces:
            return mx.stack([read(source) for source in step.sources[start:stop]])
        if name not in self._whole:
            self._whole |= step.run(read)
        rows = self._whole[name][start:stop]
        if stop == self._whole[name].shape[0]:
            del self._whole[name]
        return rows

    def _reading(self, start: int, stop: int) -> Read:
        """A function that reads some rows of a stored tensor."""

        def read(name: str) -> mx.array:
            stored = self.plan.source.tensors[name]
            part = rows_of(stored, start, stop)
            data = read_bytes(part)
            if self._hashed and name not in self._row_digests:
                self._hash(name, start, stop, data)
            return as_array(part, data)

        return read

    def _hash(self, name: str, start: int, stop: int, data: np.ndarray) -> None:
        done, digest = self._hashing.pop(name, (0, hashlib.sha256()))
        if done != start:
            raise RuntimeError(f"rows of {name} are not read in order: {start} after {done}")
        digest.update(data.data)
        if stop == self.plan.source.tensors[name].shape[0]:
            self._row_digests[name] = digest.hexdigest()
        else:
            self._hashing[name] = stop, digest


def unit_of(name: str) -> str:
    """ "model.layers.3" for every tensor of that layer; else the path of the module."""
    if name.startswith(LAYERS):
        return ".".join(name.split(".")[:3])
    return name.rpartition(".")[0]


def is_quantized(mapping: WeightMapping, name: str) -> bool:
    """Whether a tensor is part of a quantised weight; a bias of the map is not."""
    path, _, part = name.rpartition(".")
    return path in mapping.quantized and part != "bias"


def plain_shapes(mapping: WeightMapping) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight, of a quantised one as it is when dequantised."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, spec in mapping.outputs.items():
        path, _, part = name.rpartition(".")
        if not is_quantized(mapping, name):
            shapes[name] = spec.shape
        elif part == "weight":
            *rows, words = spec.shape
            shapes[name] = (*rows, words * 32 // mapping.quantized[path].bits)
    return shapes


def _expert_paths(unit: str) -> list[str]:
    return [f"{unit}.mlp.switch_mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
