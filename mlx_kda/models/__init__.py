"""Hybrid models by model_type, and how a checkpoint's folder becomes one."""

import importlib
from types import ModuleType
from typing import Any

from ..errors import CheckpointError

# model_type in config.json -> module with Model and ModelArgs
FAMILIES = {"kimi_linear": "kimi_linear", "kda": "fla_kda"}
# model_type -> module and class of its config, which a converter reads without any layer
CONFIGS = {
    "kimi_linear": ("config", "KimiLinearConfig"),
    "kda": ("fla_kda_config", "FlaKdaConfig"),
}


def family(config: dict[str, Any]) -> ModuleType:
    """The module of a model_type; CheckpointError if there is none."""
    return importlib.import_module(f"{__name__}.{FAMILIES[model_type(config)]}")


def model_type(config: dict[str, Any]) -> str:
    """The model_type of a config; CheckpointError where no family here has it."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        what = "no model_type" if kind is None else f"model_type {kind!r} is not supported"
        raise CheckpointError(f"config.json: {what}; supported: {', '.join(FAMILIES)}")
    return kind


def read_config(config: dict[str, Any]) -> Any:
    """config.json of any family as its dataclass; CheckpointError names what is wrong with it."""
    module, name = CONFIGS[model_type(config)]
    kind = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    try:
        return kind.from_dict(config)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"config.json holds a value of a wrong kind: {error}") from error


def get_model_classes(config: dict[str, Any]) -> tuple[type, type]:
    """(Model, ModelArgs) for a config, as ``mlx_lm.utils.load_model(get_model_classes=)`` asks."""
    module = family(config)
    return module.Model, module.ModelArgs


def __getattr__(name: str) -> Any:
    if name in ("load", "load_model"):
        return getattr(importlib.import_module(f"{__name__}.loading"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FAMILIES",
    "family",
    "get_model_classes",
    "load",
    "load_model",
    "model_type",
    "read_config",
]
