"""Kimi Linear: KDA layers with an MLA layer now and then, dense or mixture-of-experts blocks."""

from .config import KimiLinearConfig
from .hybrid import DecoderLayer, HybridModel

ModelArgs = KimiLinearConfig


class Model(HybridModel):
    """Kimi Linear with its output head."""


__all__ = ["DecoderLayer", "Model", "ModelArgs"]
