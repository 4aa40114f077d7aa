"""Checkpoints from Hugging Face to MLX: convert, plan, inspect and verify."""

from .checks import Verification
from .conversion import convert
from .planning import Plan, inspect, plan
from .report import ConversionReport
from .verification import verify

__all__ = ["ConversionReport", "Plan", "Verification", "convert", "inspect", "plan", "verify"]
