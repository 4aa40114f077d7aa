"""What a model carries from step to step: fixed-size KDA states and MLA latents.

Names are loaded on first use: a policy's name can be checked without importing MLX.
"""

import importlib
from typing import Any

_HOMES = {"LatentCache": "latent_cache", "Policy": "policy", "make_cache": "latent_cache"}
DEFAULT_BUDGET = 2**30  # bytes of the checkpoints that a session takes by itself

__all__ = ["DEFAULT_BUDGET", "LatentCache", "Policy", "make_cache"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
