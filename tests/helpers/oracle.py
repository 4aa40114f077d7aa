"""The float64 oracle, where tests look for it."""

from mlx_kda.oracle import (
    CORRELATED,
    ROWS,
    UNCORRELATED,
    Inputs,
    error,
    make,
    recurrence,
)

__all__ = ["CORRELATED", "ROWS", "UNCORRELATED", "Inputs", "error", "make", "recurrence"]
