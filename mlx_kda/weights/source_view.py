"""A checkpoint as a mapping sees it: quantised weights are plain, or in MLX's own format."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from . import stored_formats
from .quantization import Quantization, dequantize
from .safetensors import DTYPE_WORDS, Read, Spec
from .source import CheckpointSource
from .weight_mapping import Step

SPLIT = re.compile(r"\.kv_b_proj$")  # is split by head, which takes plain weights


@dataclass(frozen=True)
class DerivedTensor(Spec):
    """A tensor computed from stored ones; with ``by_rows``, each row from the same rows of them."""

    sources: tuple[str, ...]
    run: Callable[[Read], mx.array]
    by_rows: bool = False


@dataclass
class SourceView:
    """The config and the tensors of a checkpoint, its quantised weights made readable."""

    config: dict[str, Any]
    tensors: dict[str, Spec]
    notes: list[str] = field(default_factory=list)

    def stored(self, steps: Iterable[Step]) -> list[str]:
        """Names of the stored tensors that steps read, in order."""
        return self.stored_of(name for step in steps for name in step.sources)

    def stored_of(self, names: Iterable[str]) -> list[str]:
        """Names of the stored tensors that these tensors are computed from, in order."""
        stored: list[str] = []
        for name in names:
            tensor = self.tensors[name]
            stored += tensor.sources if isinstance(tensor, DerivedTensor) else [name]
        return stored

    def reading(self, read: Read) -> Read:
        """What reads the tensors seen here, given what reads stored ones."""

        def read_any(name: str) -> mx.array:
            tensor = self.tensors[name]
            return tensor.run(read) if isinstance(tensor, DerivedTensor) else read(name)

        return read_any


def view_source(source: CheckpointSource, dequantize: bool = False) -> SourceView:
    """See a checkpoint's quantised weights in MLX's format, or plain.

    Weights are kept in MLX's format where that is exact, unless ``dequantize``. Raises
    CheckpointError where the format is not supported.
    """
    config, tensors = dict(source.config), dict[str, Spec](source.tensors)
    if stored_formats.is_compressed(config):
        return _compressed(config, tensors, dequantize)
    if dequantize and config.get("quantization"):
        return _dequantised(config, tensors)
    return SourceView(config, tensors)


def _compressed(config: dict[str, Any], tensors: dict[str, Spec], dequantize: bool) -> SourceView:
    found = stored_formats.packed_weights(config, tensors)
    dtype = _dtype(config)
    result = SourceView({k: v for k, v in config.items() if k != "quantization_config"}, tensors)
    taken = 0
    # experts are stacked, so either all of a layer stay quantised or none
    apart = {_group(one.path) for one in found if not one.is_mlx or SPLIT.search(one.path)}
    apart |= {_group(name.removesuffix(".weight")) for name in tensors if name.endswith(".weight")}
    for one in found:
        specs = {part: tensors.pop(one.name(part)) for part in one.parts}
        scale = specs["weight_scale"]
        sources = tuple(one.name(part) for part in stored_formats.PARTS if part in one.parts)
        if dequantize or _group(one.path) in apart:
            kind = dtype if scale.dtype == mx.uint8 else scale.dtype
            plain = partial(stored_formats.dequantize, one, dtype=kind)
            tensors[f"{one.path}.weight"] = DerivedTensor(one.shape, kind, sources, plain)
            continue
        taken += 1
        shape = (one.shape[0], one.shape[1] * one.bits // 32)
        made = {"weight": Spec(shape, mx.uint32), "scales": Spec(scale.shape, scale.dtype)}
        if one.format == stored_formats.INTEGERS:
            made["biases"] = made["scales"]
        for part, spec in made.items():
            needed = sources if part == "weight" else (one.name("weight_scale"),)
            run = partial(stored_formats.mlx_part, one, part)
            tensors[f"{one.path}.{part}"] = DerivedTensor(spec.shape, spec.dtype, needed, run)
    if taken:
        result.notes.append(f"{taken} compressed-tensors weights taken over unchanged")
    if taken < len(found):
        result.notes.append(f"{len(found) - taken} compressed-tensors weights dequantised")
    return result


def _group(path: str) -> str:
    head, found, tail = path.partition(".experts.")
    return f"{head}.experts.{tail.partition('.')[2]}" if found else path


def _dequantised(config: dict[str, Any], tensors: dict[str, Spec]) -> SourceView:
    """MLX's quantised weights as plain ones, by the settings in the config."""
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
            raise CheckpointError(f"{path} has a global scale, which cannot be dequantised yet")
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
        run = partial(_dequantise, names, Quantization(bits, group, mode), kind)
        tensors[f"{path}.weight"] = DerivedTensor(shape, kind, names, run, by_rows=True)
    result.notes.append(f"{len(paths)} MLX-quantised weights dequantised")
    return result


def _dequantise(
    names: tuple[str, ...], settings: Quantization, dtype: mx.Dtype, read: Read
) -> mx.array:
    return dequantize((read(name) for name in names), settings, dtype)


def _dtype(config: dict[str, Any]) -> mx.Dtype:
    """The dtype that a config names; bfloat16 where it names none."""
    return DTYPE_WORDS.get(str(config.get("torch_dtype") or config.get("dtype")), mx.bfloat16)
