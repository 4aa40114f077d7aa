"""Loading a model and its tokenizer from a checkpoint, with every tensor accounted for."""

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..doctor import prepare
from ..errors import CheckpointError
from ..layers.blas_layout import lay_out
from ..tokenizer import load_tokenizer
from ..weights.quantization import Quantization
from ..weights.source import CheckpointSource, open_source
from ..weights.weight_mapping import Step
from . import get_model_classes, map_checkpoint

EMBEDDING = "model.embed_tokens.weight"
ROUTER = "mlp.gate.weight"


def load(path: str | Path, runner: str = "auto") -> tuple[nn.Module, Any]:
    """Model and tokenizer of a checkpoint: an MLX folder (ours or mlx-lm's), or a Hugging Face one.

    Args:
        path: the folder, or a hub id ``owner/name``.
        runner: how the KDA layers' kernels are run.

    Raises:
        CheckpointError: one line saying what is missing, damaged, unknown or left over.
    """
    source = open_source(path)
    return _build(source, runner), load_tokenizer(source.folder)


def load_model(path: str | Path, runner: str = "auto") -> nn.Module:
    """The model alone; see ``load``."""
    return _build(open_source(path), runner)


def _build(source: CheckpointSource, runner: str) -> nn.Module:
    args, mapping = map_checkpoint(source.config, source.tensors)
    model = get_model_classes(source.config)[0](args)
    model.runner = runner
    weights = _made(mapping.steps, _read(source))
    _quantise(model, mapping.quantized, weights, source.config.get("quantization") or {})
    model.load_weights(list(_at_working_dtype(weights).items()))
    del weights
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    lay_out(model)
    model.merge()
    model.eval()
    prepare(model, model.model.dtype)
    return model


def _read(source: CheckpointSource) -> dict[str, mx.array]:
    """Every tensor of the folder; MLX reads each from disk when it is used."""
    arrays: dict[str, mx.array] = {}
    for file in sorted({stored.file for stored in source.tensors.values()}):
        arrays |= cast(dict[str, mx.array], mx.load(str(file)))
    return arrays


def _made(steps: list[Step], arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """The model's weights. The caller keeps no ``arrays``, so each is freed once it is used."""
    weights: dict[str, mx.array] = {}
    for step in steps:
        weights |= step.run(arrays.__getitem__)
    return weights


def _quantise(
    model: nn.Module,
    quantized: dict[str, Quantization],
    weights: dict[str, mx.array],
    settings: dict[str, Any],
) -> None:
    """Turn the layers whose weights are quantised into quantised layers.

    Their shapes determine the settings; a config.json that contradicts them is refused.
    """
    chosen: dict[str, dict[str, Any]] = {}
    for path, how in quantized.items():
        found, stated = how.as_config(), settings.get(path)
        if isinstance(stated, dict) and any(stated.get(k, v) != v for k, v in found.items()):
            raise CheckpointError(
                f"{path}: the shapes of its tensors say {found}, config.json's quantization says "
                f"{stated}"
            )
        chosen[path] = found
        if f"{path}.global_scale" in weights:
            if mx.default_device() == mx.cpu:
                raise CheckpointError(f"{path} has a global scale, which MLX has on a GPU only")
            found["global_scale"] = True
    if chosen:
        nn.quantize(model, class_predicate=lambda path, _: chosen.get(path, False))


def _at_working_dtype(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Weights in the dtypes they are used in, cast once instead of at every step.

    The router's are used in float32. The rest follow the dtype that most weights have: the
    embedding, which sets that of the activations, and 16-bit weights of the other kind.
    """
    sizes: dict[mx.Dtype, int] = {}
    for name, w in weights.items():
        if mx.issubdtype(w.dtype, mx.floating) and not name.endswith(ROUTER):
            sizes[w.dtype] = sizes.get(w.dtype, 0) + w.size
    dtype = max(sizes, key=sizes.__getitem__)

    def at_dtype(name: str, w: mx.array) -> mx.array:
        if not mx.issubdtype(w.dtype, mx.floating):
            return w
        if name.endswith(ROUTER):
            return w.astype(mx.float32)
        if name == EMBEDDING or w.dtype in (mx.float16, mx.bfloat16):
            return w.astype(dtype)
        return w

    return {name: at_dtype(name, w) for name, w in weights.items()}
