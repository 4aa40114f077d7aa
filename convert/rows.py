"""Some rows of a weight at a time: a few experts of a stack, a few words of an embedding.

A layer of Kimi Linear 48B holds 7 GB of experts in float32, one expert 28 MB.
"""

import hashlib
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from ..weights.safetensors import Read, as_array, read_bytes, rows_of
from ..weights.source import Reader
from ..weights.source_view import DerivedTensor
from ..weights.weight_mapping import Step
from .layout import Layout

BLOCK = 1 << 24  # elements read at a time
PARTS = ("weight", "scales", "biases")


class Rows:
    """Reads rows of the weights that a layout makes, packed ones dequantised to float32.

    Others keep their dtype. `digests` holds the SHA-256 of stored tensors whose rows were asked for
    in order, from the first to the last, unless `hashed` is false.
    """

    def __init__(self, layout: Layout, hashed: bool):
        self._view, self._packed = layout.view, layout.mapping.quantized
        self._source, self._hashed = layout.source, hashed
        self._steps = {name: step for step in layout.mapping.steps for name in step.outputs}
        self._hashing: dict[str, tuple[int, hashlib._Hash]] = {}
        self._whole: dict[str, mx.array] = {}
        self.reader: Reader | None = None  # of tensors that are read whole
        self.digests: dict[str, str] = {}

    def blocks(self, path: str, at_a_time: int | None = None) -> Iterator[tuple[int, int]]:
        """(start, stop) of all rows of a weight, in blocks of about `BLOCK` elements."""
        spec = self._steps[f"{path}.weight"].outputs[f"{path}.weight"]
        width = spec.size // spec.shape[0]
        if path in self._packed:
            width = width * 32 // self._packed[path]["bits"]
        step = at_a_time or max(1, BLOCK // width)
        for start in range(0, spec.shape[0], step):
            yield start, min(start + step, spec.shape[0])

    def __call__(self, path: str, start: int, stop: int) -> mx.array:
        """Rows of a weight, [stop - start, ...]."""
        names = [f"{path}.{part}" for part in PARTS if f"{path}.{part}" in self._steps]
        parts = [self._rows(name, start, stop) for name in names]
        if path not in self._packed:
            return parts[0]
        return mx.dequantize(*parts, **self._packed[path], dtype=mx.float32)

    def stored(self, path: str, start: int, stop: int) -> list[str]:
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
        """Whether a row of what the step makes needs the same row of its sources and no more."""
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
        """What reads some rows of a stored tensor."""

        def read(name: str) -> mx.array:
            stored = self._source.tensors[name]
            part = rows_of(stored, start, stop)
            data = read_bytes(part)
            if self._hashed and name not in self.digests:
                self._hash(name, start, data)
                if stop == stored.shape[0]:
                    self.digests[name] = self._hashing.pop(name)[1].hexdigest()
                else:
                    self._hashing[name] = stop, self._hashing[name][1]
            return as_array(part, data)

        return read

    def _hash(self, name: str, start: int, data: np.ndarray) -> None:
        done, digest = self._hashing.setdefault(name, (0, hashlib.sha256()))
        if done != start:
            raise RuntimeError(f"rows of {name} are not read in order: {start} after {done}")
        digest.update(data)
