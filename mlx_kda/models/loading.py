"""From a checkpoint's folder to a model and its tokenizer, with every tensor accounted for."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import CheckpointError
from . import family

# The settings that each mode of MLX's quantiser fixes, by the modes whose scales are not floats.
_PACKED_MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}


def load(path: str | Path, runner: str = "auto") -> tuple[nn.Module, Any]:
    """Model and tokenizer of a checkpoint: an MLX folder (ours or mlx-lm's), or a Hugging Face one.

    Args:
        path: the folder, or a hub id ``owner/name``.
        runner: how the KDA layers' kernels are run.

    Raises:
        CheckpointError: one line saying what is missing, damaged, unknown or left over.
    """
    from ..convert.source import open_source
    from ..tokenizer import load_tokenizer

    source = open_source(path)
    return _build(source, runner), load_tokenizer(source.folder)


def load_model(path: str | Path, runner: str = "auto") -> nn.Module:
    """The model alone; see ``load``."""
    from ..convert.source import open_source

    return _build(open_source(path), runner)


def _build(source: Any, runner: str) -> nn.Module:
    module = family(source.config)
    model = module.Model(module.ModelArgs.from_dict(source.config))
    model.runner = runner
    # Read lazily and kept by nobody else, so that a layer's source tensors go once it is stacked.
    weights = model.sanitize(_read(source))
    _quantise(model, weights, source.config)
    _assign(model, _at_working_dtype(weights))
    del weights
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model.eval()


def _read(source: Any) -> dict[str, mx.array]:
    arrays: dict[str, mx.array] = {}
    for file in sorted({stored.file for stored in source.tensors.values()}):
        arrays |= mx.load(str(file))
    return arrays


def _quantise(model: nn.Module, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    """Make the layers whose weights are packed into quantised ones, each with its own settings."""
    settings = config.get("quantization")
    packed = {name[: -len(".scales")] for name in weights if name.endswith(".scales")}
    if settings is None:
        foreign = config.get("quantization_config")
        if isinstance(foreign, dict) and "quant_method" in foreign:
            raise CheckpointError(
                f"config.json: quantization method {foreign['quant_method']!r} is not supported; "
                "convert the unquantised checkpoint instead"
            )
        settings = foreign if isinstance(foreign, dict) else {}
    if not packed:
        return
    modules = dict(model.named_modules())
    chosen = {}
    for path in packed:
        module = modules.get(path)
        if module is None or not hasattr(module, "to_quantized"):
            raise CheckpointError(f"{path} is quantised, but it is no layer that can be")
        chosen[path] = _packing(path, module, weights, settings.get(path))
    nn.quantize(model, class_predicate=lambda path, _: chosen.get(path, False))


def _packing(
    path: str, module: nn.Module, weights: dict[str, mx.array], named: Any
) -> dict[str, Any]:
    """Group size, bits and mode of one packed layer: read off its shapes, checked against config.

    The shapes say it without doubt, which a default for the whole model does not.
    """
    width = module.weight.shape[-1]
    scales = weights[f"{path}.scales"]
    group_size = width // scales.shape[-1]
    bits = weights[f"{path}.weight"].shape[-1] * 32 // width
    mode = "affine"
    if scales.dtype == mx.uint8:
        mode = _PACKED_MODES.get((bits, group_size))
    found = {"group_size": group_size, "bits": bits, "mode": mode}
    wanted = dict(found, **named) if isinstance(named, dict) else found
    wanted.pop("global_scale", None)
    if mode is None or wanted != found:
        raise CheckpointError(
            f"{path}: its packed shapes say {found}, which is not what config.json's quantization "
            f"says ({named})"
        )
    if f"{path}.global_scale" in weights:
        if mx.default_device() == mx.cpu:
            raise CheckpointError(f"{path} has a global scale, which MLX computes on a GPU only")
        found["global_scale"] = True
    return found


def _at_working_dtype(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The router's weights in float32, where they are used, once instead of at every step.

    And the embedding in the dtype that most weights have: the activations follow it.
    """
    sizes: dict[mx.Dtype, int] = {}
    for w in weights.values():
        if mx.issubdtype(w.dtype, mx.floating):
            sizes[w.dtype] = sizes.get(w.dtype, 0) + w.size
    wanted = {"model.embed_tokens.weight": max(sizes, key=sizes.__getitem__, default=mx.float32)}

    def cast(name: str, w: mx.array) -> mx.array:
        if not mx.issubdtype(w.dtype, mx.floating):
            return w
        return w.astype(
            mx.float32 if name.endswith("mlp.gate.weight") else wanted.get(name, w.dtype)
        )

    return {name: cast(name, w) for name, w in weights.items()}


def _assign(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Set every parameter from ``weights``; a leftover, a gap or a wrong shape is an error."""
    wanted = dict(tree_flatten(model.parameters()))
    for what, names in (
        ("is missing", wanted.keys() - weights.keys()),
        ("is not used by this model", weights.keys() - wanted.keys()),
    ):
        if names:
            rest = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"{min(names)} {what}{rest}")
    for name, array in weights.items():
        if array.shape != wanted[name].shape:
            raise CheckpointError(
                f"{name} has shape {array.shape}, the config asks for {wanted[name].shape}"
            )
    model.load_weights(list(weights.items()))
