"""Layers: short convolution, KDA, MLA, MoE. They know nothing of checkpoints.

Names are loaded on first use: MLA and MoE import mlx-lm, which takes a second or more.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conv import ShortConv
    from .kda import KimiDeltaAttention
    from .mla import MLA
    from .mlp import MLP
    from .moe import MoE
    from .norm import RMSNorm
    from .padding import Padding

_HOMES = {
    "KimiDeltaAttention": "kda",
    "MLA": "mla",
    "MLP": "mlp",
    "MoE": "moe",
    "Padding": "padding",
    "RMSNorm": "norm",
    "ShortConv": "conv",
}

__all__ = ["MLA", "MLP", "KimiDeltaAttention", "MoE", "Padding", "RMSNorm", "ShortConv"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
