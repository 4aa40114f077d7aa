"""A source as the mapping shall see it: what came quantised is plain, or in MLX's own packing."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from . import stored_formats as foreign
from .safetensors import DTYPE_WORDS, Read, Spec
from .source import CheckpointSource
from .weight_mapping import Step

SPLIT = re.compile(r"\.kv_b_proj$")  # is split by head, which takes plain weights


@dataclass(frozen=True)
class DerivedTensor(Spec):
    """A tensor made from stored ones, `by_rows` each of its rows from the same rows of them."""

    sources: tuple[str, ...]
    run: Callable[[Read], mx.array]
    by_rows: bool = False


@dataclass
class SourceView:
    """The tensors and the config of a source, with what was unpacked or packed anew."""

    config: dict[str, Any]
    tensors: dict[str, Spec]
    notes: list[str] = field(default_factory=list)

    def stored(self, steps: Iterable[Step]) -> list[str]:
        """Names of the stored tensors that the steps read, in order."""
        return self.stored_of(name for step in steps for name in step.sources)

    def stored_of(self, names: Iterable[str]) -> list[str]:
        """Names of the stored tensors that some tensors seen here are read from, in order."""
        stored: list[str] = []
        for name in names:
            tensor = self.tensors[name]
            stored += tensor.sources if isinstance(tensor, DerivedTensor) else [name]
        return stored

    def reading(self, read: Read) -> Read:
        """What steps read with, given what reads stored tensors."""

        def read_any(name: str) -> mx.array:
            tensor = self.tensors[name]
            return tensor.run(read) if isinstance(tensor, DerivedTensor) else read(name)

        return read_any


def view_source(source: CheckpointSource, dequantize: bool = False) -> SourceView:
    """See a source without its quantisation, or with MLX's where that is the same weights.

    A source that is not quantised is seen as it is. Raises CheckpointError where the layout is
    not known.
    """
    config, tensors = dict(source.config), dict(source.tensors)
    if foreign.is_compressed(config):
        return _compressed(config, tensors, dequantize)
    if dequantize and config.get("quantization"):
        return _dequantised(config, tensors)
    return SourceView(config, tensors)


def _compressed(config: dict[str, Any], tensors: dict[str, Spec], dequantize: bool) -> SourceView:
    found = foreign.layouts(config, tensors)
    dtype = _dtype(config)
    result = SourceView({k: v for k, v in config.items() if k != "quantization_config"}, tensors)
    taken, plain = 0, 0
    # experts are stacked, so all of a layer or none can stay packed
    apart = {_group(one.path) for one in found if not one.is_ours or SPLIT.search(one.path)}
    apart |= {_group(name.removesuffix(".weight")) for name in tensors if name.endswith(".weight")}
    for one in found:
        packed = not dequantize and _group(one.path) not in apart
        specs = {part: tensors.pop(one.name(part)) for part in one.parts}
        scale = specs["weight_scale"]
        sources = tuple(one.name(part) for part in foreign.PARTS if part in one.parts)
        if not packed:
            kind = dtype if scale.dtype == mx.uint8 else scale.dtype
            run = lambda read, one=one, kind=kind: foreign.as_plain(one, read, kind)  # noqa: E731
            tensors[f"{one.path}.weight"] = DerivedTensor(one.shape, kind, sources, run)
            plain += 1
            continue
        shape = (one.shape[0], one.shape[1] * one.bits // 32)
        made = {"weight": Spec(shape, mx.uint32), "scales": Spec(scale.shape, scale.dtype)}
        if one.format == foreign.INTEGERS:
            made["biases"] = made["scales"]
        for part, spec in made.items():
            run = lambda read, one=one, part=part: foreign.packed_part(one, part, read)  # noqa: E731
            needed = sources if part == "weight" else (one.name("weight_scale"),)
            tensors[f"{one.path}.{part}"] = DerivedTensor(spec.shape, spec.dtype, needed, run)
        taken += 1
    if taken:
        result.notes.append(f"{taken} packed weights of compressed-tensors taken over unchanged")
    if plain:
        result.notes.append(f"{plain} packed weights of compressed-tensors dequantised")
    return result


def _group(path: str) -> str:
    head, found, tail = path.partition(".experts.")
    return f"{head}.experts.{tail.partition('.')[2]}" if found else path


def _dequantised(config: dict[str, Any], tensors: dict[str, Spec]) -> SourceView:
    """Weights that MLX packed, by the settings in the config."""
    settings = config["quantization"]
    result = SourceView(
        {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")},
        tensors,
    )
    paths = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    for path in paths:
        own = settings.get(path)
        how = own if isinstance(own, dict) else settings
        if f"{path}.global_scale" in tensors:
            raise CheckpointError(f"{path} has a global scale, which is not dequantised yet")
        parts = [p for p in ("weight", "scales", "biases") if f"{path}.{p}" in tensors]
        specs = {part: tensors.pop(f"{path}.{part}") for part in parts}
        try:
            bits, group = int(how["bits"]), int(how["group_size"])
            mode = how.get("mode", "affine")
            *rows, words = specs["weight"].shape
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"config.json does not say how {path} is quantised") from error
        shape = (*rows, words * 32 // bits)
        if specs["scales"].shape != (*rows, shape[-1] // group):
            raise CheckpointError(
                f"{path}: its scales are {list(specs['scales'].shape)}, config.json says {bits} "
                f"bits in groups of {group}"
            )
        kind = specs["scales"].dtype if mode == "affine" else _dtype(config)
        names = tuple(f"{path}.{part}" for part in parts)
        settled = {"group_size": group, "bits": bits, "mode": mode, "dtype": kind}

        def run(read: Read, names: tuple = names, settled: dict = settled) -> mx.array:
            return mx.dequantize(*(read(name) for name in names), **settled)

        tensors[f"{path}.weight"] = DerivedTensor(shape, kind, names, run, by_rows=True)
    result.notes.append(f"{len(paths)} packed weights of MLX dequantised")
    return result


def _dtype(config: dict[str, Any]) -> mx.Dtype:
    """The dtype that a config names; bfloat16 where it names none."""
    return DTYPE_WORDS.get(str(config.get("torch_dtype") or config.get("dtype")), mx.bfloat16)
