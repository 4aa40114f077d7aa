"""Layers: short convolution, KDA, MLA, MoE. They know nothing of checkpoints."""

from .conv import ShortConv
from .kda import KimiDeltaAttention
from .mla import MLA
from .mlp import MLP
from .moe import MoE
from .norm import RMSNorm
from .padding import Padding

__all__ = ["MLA", "MLP", "KimiDeltaAttention", "MoE", "Padding", "RMSNorm", "ShortConv"]
