"""Faults planted for the emulator to find, by name."""

from . import divergence, memory, races, values
from .case import Case, N

CASES = memory.CASES | races.CASES | divergence.CASES | values.CASES

__all__ = ["CASES", "Case", "N"]
