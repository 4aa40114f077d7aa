"""The kinds of `mlx-kda bench` by name: their options, columns, and how their rows are made."""

from .kernels import KERNELS
from .kind import LONGEST, Benchmark
from .models import MODELS
from .promises import PROMISES, Promise

BENCHMARKS = {each.name: each for each in (*KERNELS, *MODELS, *PROMISES)}

__all__ = ["BENCHMARKS", "LONGEST", "Benchmark", "Promise"]
