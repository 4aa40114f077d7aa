"""The kinds of `mlx-kda bench` by name: their options, columns, and how their rows are made."""

from mlx_kda.cli.benchmarks.kernels import KERNELS
from mlx_kda.cli.benchmarks.kind import LONGEST, Benchmark
from mlx_kda.cli.benchmarks.models import MODELS
from mlx_kda.cli.benchmarks.promises import PROMISES, Promise

BENCHMARKS = {each.name: each for each in (*KERNELS, *MODELS, *PROMISES)}

__all__ = ["BENCHMARKS", "LONGEST", "Benchmark", "Promise"]
