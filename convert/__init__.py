"""Checkpoints from Hugging Face to MLX: read, map, cast, quantise, write, verify."""

from .inspection import inspect
from .plan import Plan, plan
from .report import ConversionReport
from .run import convert

__all__ = ["ConversionReport", "Plan", "convert", "inspect", "plan"]
