"""Checkpoints from Hugging Face to MLX: read, map, cast, quantise, write, plan, verify."""

import importlib
from typing import Any

# Imported when they are asked for: they stand on models and caches, which stand on this package.
_HOMES = {
    "ConversionReport": "report",
    "Plan": "planning",
    "Verification": "checks",
    "convert": "run",
    "inspect": "inspection",
    "plan": "planning",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["ConversionReport", "Plan", "Verification", "convert", "inspect", "plan", "verify"]
