"""Checkpoints from Hugging Face to MLX: read, map, cast, quantise, write."""

from .inspection import inspect
from .report import ConversionReport
from .run import convert

__all__ = ["ConversionReport", "convert", "inspect"]
