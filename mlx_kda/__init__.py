"""Kimi Delta Attention (KDA) for Apple Silicon, on MLX.

Names are loaded on first use, so that importing the package costs nothing.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

_HOME = {
    "kda": "attention",
    "kda_ref": "ops",
    "kda_chunk_ref": "ops",
    "explain": "attention",
    "softplus_gate": "ops",
    "bounded_gate": "ops",
    "load": "models",
    "Session": "session",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
