"""`bench buffers`: prefill and decode with MLX's command buffers of several lengths.

MLX hands a GPU its launches in command buffers. It ends one after so many launches, or once their
inputs hold so many million numbers, all experts of a layer counted whatever few are read, and each
end costs time. The limits are read once, when MLX starts: each setting is a process of its own, and
they take turns.
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
from . import results
from .timing import STEADY, spread

# What is called MB counts millions of numbers.
OPS, NUMBERS = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
SETTINGS = {
    "MLX's own": {},
    "1000, 400": {OPS: "1000", NUMBERS: "400"},
    "1000, 2000": {OPS: "1000", NUMBERS: "2000"},
}


def run(arguments: Sequence[str], rounds: int = 3) -> Iterator[dict[str, Any]]:
    """One row for each (setting, phase): median and spread over the rounds.

    Args:
        arguments: of `bench model`, which measures; our model alone.
        rounds: processes of each setting.

    Raises:
        UserError: with the last line of a process that failed.
    """
    taken: dict[tuple[str, str], list[dict[str, Any]]] = {}
    try:
        for _ in range(rounds):
            for name, setting in SETTINGS.items():
                for row in _measured(arguments, setting):
                    taken.setdefault((name, row["phase"]), []).append(row)
    except GeneratorExit:
        raise
    except BaseException:  # stopped, or failed: what was measured is told first
        yield from _rows(taken)
        raise
    yield from _rows(taken)


def _rows(taken: dict[tuple[str, str], list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for (name, phase), rows in taken.items():
        times = [row["ms"] for row in rows]
        noise = spread(times) if len(times) > 1 else rows[0]["spread"]
        yield {
            "candidate": name,
            "phase": phase,
            "context": rows[0]["context"],
            "ms": statistics.median(times),
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
        return results.load(Path(folder) / "model.json")["rows"]


def _environment(setting: dict[str, str]) -> dict[str, str]:
    """This process's, but for what the user set of the two."""
    return {k: v for k, v in os.environ.items() if k not in (OPS, NUMBERS)} | setting
