"""`mlx-kda bench buffers`: prefill and decode with MLX's command buffers of several lengths.

MLX submits launches to a GPU in command buffers. It ends a buffer after a number of launches, or
once their inputs hold so many million elements (all experts of a layer count, however few are
read), and each end costs time. MLX reads both limits once, when it starts: each setting runs in a
process of its own, and they take turns.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from .results import Benchmark, columns, load
from .timing import STEADY, spread

BENCHMARK = Benchmark(
    "buffers",
    "Prefill and decode with MLX's command buffers of several lengths",
    columns(
        "context phase candidate ms tokens_per_second spread peak_mb",
        candidate="MLX_MAX_OPS_PER_BUFFER, MLX_MAX_MB_PER_BUFFER",
        tokens_per_second="tokens/s",
        peak_mb="peak MB",
    ),
    "Our model; one process per setting and round, taking turns. MLX ends a command buffer at "
    "either limit; what it calls MB are millions of elements. A CPU has no command buffers.",
)
# What is called MB counts millions of elements.
OPS, NUMBERS = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
SETTINGS = {
    "MLX's own": {},
    "1000, 400": {OPS: "1000", NUMBERS: "400"},
    "1000, 2000": {OPS: "1000", NUMBERS: "2000"},
}


def run(arguments: Sequence[str], rounds: int = 3) -> Iterator[dict[str, Any]]:
    """Yield one row for each (setting, phase): median and spread over the rounds.

    An interrupted run yields what it has measured first.

    Args:
        arguments: of ``mlx-kda bench model``, which measures our model.
        rounds: processes for each setting.

    Raises:
        UserError: a process failed; with its last line.
    """
    taken: dict[tuple[str, str], list[dict[str, Any]]] = {}
    try:
        for _ in range(rounds):
            for name, setting in SETTINGS.items():
                for row in _measured(arguments, setting):
                    taken.setdefault((name, row["phase"]), []).append(row)
    except GeneratorExit:
        raise
    except BaseException:
        yield from _rows(taken)
        raise
    yield from _rows(taken)


def _rows(taken: dict[tuple[str, str], list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for (name, phase), rows in taken.items():
        # The spread of a single process is its own.
        noise = spread([row["ms"] for row in rows]) if len(rows) > 1 else rows[0]["spread"]
        yield {
            "candidate": name,
            "phase": phase,
            "context": rows[0]["context"],
            "ms": statistics.median(row["ms"] for row in rows),
            "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows),
            "spread": noise,
            "steady": noise <= STEADY,
            "samples": len(rows),
            "peak_mb": max(row["peak_mb"] for row in rows),
        }


def _measured(arguments: Sequence[str], setting: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of ``bench model`` in a process with this setting."""
    with tempfile.TemporaryDirectory(prefix="mlx-kda-bench-") as folder:
        command = [sys.executable, "-m", "mlx_kda", "bench", "model", *arguments]
        command += ["--candidates", "ours", "--out", folder]
        done = subprocess.run(
            command, env=_environment(setting), capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise UserError(f"bench model ended with status {done.returncode}: {lines[-1]}")
        return load(Path(folder) / "model.json")["rows"]


def _environment(setting: dict[str, str]) -> dict[str, str]:
    """This process's environment with the two limits as given."""
    return {k: v for k, v in os.environ.items() if k not in (OPS, NUMBERS)} | setting
