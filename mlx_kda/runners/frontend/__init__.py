"""A strict check that generated Metal text would compile: clang with real address spaces."""

from .check import Diagnostic, Report, check, frontend_check
from .clang import find_clang

__all__ = ["Diagnostic", "Report", "check", "find_clang", "frontend_check"]
