"""The weights of a checkpoint as plain float32 arrays, unit by unit: embedding, layers, head."""

from collections.abc import Iterator

import mlx.core as mx

from ..weights.safetensors import Read
from ..weights.source_view import SourceView
from ..weights.weight_mapping import Step, WeightMapping
from .layout import Layout

LAYERS = "model.layers."


def units(layout: Layout) -> dict[str, list[Step]]:
    """The steps of a mapping by the unit whose weights they make, in the order of the model."""
    found: dict[str, list[Step]] = {}
    for step in layout.mapping.steps:
        if step.outputs:
            found.setdefault(unit_of(next(iter(step.outputs))), []).append(step)
    return found


def unit_of(name: str) -> str:
    """ "model.layers.3" for every tensor of that layer; else the path without the part."""
    if name.startswith(LAYERS):
        return ".".join(name.split(".")[:3])
    return name.rpartition(".")[0]


def plain_shapes(mapping: WeightMapping) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight, a packed one's as it is when dequantised."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, spec in mapping.outputs.items():
        path, _, part = name.rpartition(".")
        if (
            path not in mapping.quantized or part == "bias"
        ):  # a map's own bias, which is never packed
            shapes[name] = spec.shape
        elif part == "weight":
            *rows, words = spec.shape
            shapes[name] = (*rows, words * 32 // mapping.quantized[path]["bits"])
    return shapes


def plain_weights(
    steps: list[Step], view: SourceView, packed: dict[str, dict], read: Read
) -> Iterator[tuple[str, mx.array]]:
    """(name, array) of the weights that some steps make; packed ones dequantised to float32.

    Others keep their dtype.
    """
    parts: dict[str, dict[str, mx.array]] = {}
    for step in steps:
        for name, array in step.run(view.reading(read)).items():
            path, _, part = name.rpartition(".")
            if path not in packed or part == "bias":  # a map's own bias, which is never packed
                yield name, array
                continue
            parts.setdefault(path, {})[part] = array
            if len(parts[path]) == (3 if packed[path]["mode"] == "affine" else 2):
                held = parts.pop(path)
                arrays = [held[p] for p in ("weight", "scales", "biases") if p in held]
                yield (
                    f"{path}.weight",
                    mx.dequantize(*arrays, **packed[path], dtype=mx.float32),
                )
