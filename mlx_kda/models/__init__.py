"""Model families by model_type, and how a checkpoint's folder becomes a model."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CheckpointError
from .hybrid_config import HybridConfig

if TYPE_CHECKING:
    from ..weights.safetensors import Spec
    from ..weights.weight_mapping import WeightMapping


class Family(NamedTuple):
    """The modules of one family, imported when needed.

    ``config`` has ``ModelArgs``, the dataclass of config.json, and ``own_config``, which writes it
    for a converted model; it imports no MLX. ``weights`` has
    ``map_tensors`` and imports no layer; ``model`` has ``Model``.
    """

    config: str
    weights: str
    model: str = "hybrid"


# by model_type in config.json
FAMILIES = {
    "kimi_linear": Family("kimi_linear", "kimi_linear_weights"),
    "kda": Family("fla_kda", "fla_kda_weights"),
}


def family(config: Mapping[str, Any]) -> Family:
    """The family of a config; CheckpointError where its model_type is not supported."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        what = "no model_type" if kind is None else f"model_type {kind!r} is not supported"
        raise CheckpointError(f"config.json: {what}; supported: {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def get_model_classes(config: Mapping[str, Any]) -> tuple[type, type]:
    """(Model, ModelArgs) for a config, as ``mlx_lm.utils.load_model(get_model_classes=)`` asks."""
    found = family(config)
    return _module(found.model).Model, _module(found.config).ModelArgs


def read_config(config: Mapping[str, Any]) -> HybridConfig:
    """config.json of any family as its dataclass; CheckpointError names what is wrong with it."""
    kind: type[HybridConfig] = _module(family(config).config).ModelArgs
    try:
        return kind.from_dict(config)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"config.json holds a value of the wrong type: {error}") from error


def read_runnable_config(config: Mapping[str, Any]) -> HybridConfig:
    """``read_config`` of weights that MLX can use as they are.

    Raises CheckpointError, too, for weights that another library quantised.
    """
    family(config)
    stored = config.get("quantization_config")
    if isinstance(stored, dict) and "quantization" not in config:
        method = stored.get("quant_method", "unknown")
        if method == "compressed-tensors":
            raise CheckpointError(
                "the weights are quantised by compressed-tensors; convert them first: "
                "mlx-kda convert SRC OUT"
            )
        raise CheckpointError(
            f"the source is quantised ({method}): convert the unquantised checkpoint instead"
        )
    return read_config(config)


def map_tensors(config: HybridConfig, tensors: Mapping[str, "Spec"]) -> "WeightMapping":
    """How the tensors of a checkpoint become those of the model.

    Raises CheckpointError naming every tensor that is missing, left over, or of a wrong shape.
    """
    mapping: WeightMapping = _module(FAMILIES[config.model_type].weights).map_tensors(
        config, tensors
    )
    return mapping


def map_checkpoint(
    config: Mapping[str, Any], tensors: Mapping[str, "Spec"]
) -> tuple[HybridConfig, "WeightMapping"]:
    """``read_runnable_config`` and ``map_tensors`` of a whole checkpoint."""
    args = read_runnable_config(config)
    return args, map_tensors(args, tensors)


def own_config(raw: dict[str, Any], config: HybridConfig) -> tuple[dict[str, Any], list[str]]:
    """The config.json to write for a converted model, and warnings about stock mlx-lm.

    ``raw`` is the source's config.json, whose unknown keys are kept.
    """
    written: tuple[dict[str, Any], list[str]]
    written = _module(FAMILIES[config.model_type].config).own_config(raw, config)
    return written


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


def __getattr__(name: str) -> Any:
    if name in ("load", "load_model"):  # with the layers, which only a running model needs
        return getattr(_module("loading"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FAMILIES",
    "family",
    "get_model_classes",
    "load",
    "load_model",
    "map_checkpoint",
    "map_tensors",
    "own_config",
    "read_config",
    "read_runnable_config",
]
