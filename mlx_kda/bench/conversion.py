"""`bench convert`: seconds and peak memory of a conversion, ours against mlx_lm.convert."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError


def run(source: Path, *, q_bits: int | None = None, samples: int = 3) -> Iterator[dict[str, Any]]:
    """One row a candidate. Each conversion is a process of its own, and they take turns.

    Peak memory is the process's highest resident set, as the operating system counts it. A
    candidate that refuses the source gets a row with its last line under "failed".
    """
    bits = [] if q_bits is None else ["--q-bits", str(q_bits)]
    commands = {
        "ours": ["mlx_kda.cli.main", "convert", str(source), "OUT", *bits],
        "mlx-lm": [
            "mlx_lm", "convert", "--hf-path", str(source), "--mlx-path", "OUT",
            *(["-q", *bits] if bits else []),
        ],
    }  # fmt: skip
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    failed: dict[str, str] = {}
    for _ in range(samples):
        for name, command in commands.items():
            if name in failed:
                continue
            try:
                taken[name].append(_measure(command))
            except UserError as e:
                failed[name] = str(e)
    for name in commands:
        seconds = sorted(s for s, _ in taken[name])
        row: dict[str, Any] = {"candidate": name, "q_bits": q_bits, "samples": len(seconds)}
        if seconds:
            row["seconds"] = seconds[len(seconds) // 2]
            row["slowest"] = seconds[-1]
            row["peak_mb"] = max(peak for _, peak in taken[name]) / 1e6
        row["failed"] = failed.get(name)
        yield row


def _measure(command: list[str]) -> tuple[float, int]:
    """(seconds, peak resident bytes) of ``python -m command``, OUT standing for a new folder."""
    with tempfile.TemporaryDirectory(prefix="mlx-kda-bench-") as folder:
        out, peak = Path(folder) / "out", Path(folder) / "peak"
        told = [str(out) if a == "OUT" else a for a in command]
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "mlx_kda.bench.memory", str(peak), *told],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
            raise UserError(f"exit status {done.returncode}: {lines[-1]}")
        return seconds, int(peak.read_text())
