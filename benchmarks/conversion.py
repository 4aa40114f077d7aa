"""Seconds and peak memory of a conversion, `mlx-kda convert` against mlx_lm.convert.

    python benchmarks/conversion.py path/to/Kimi-Linear --q-bits 4

Each conversion is a process of its own, and they take turns.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memory
from common import add_output, count, run

from mlx_kda.bench.results import Benchmark, columns
from mlx_kda.cli import loading, options
from mlx_kda.cli.measure import measure
from mlx_kda.cli.options import BITS
from mlx_kda.errors import UserError

BENCHMARK = Benchmark(
    "convert",
    "Seconds and peak memory against mlx_lm.convert",
    columns("candidate q_bits seconds slowest peak_mb failed", q_bits="bits", peak_mb="peak MB"),
    "Each conversion is a process of its own, and starting it is most of a small one; peak is "
    "its highest resident memory.",
)


def rows(source: Path, *, q_bits: int | None = None, samples: int = 3) -> Iterator[dict[str, Any]]:
    """Yield one row for each candidate. Each conversion is a process, and they take turns.

    Peak memory is the process's highest resident set, as the operating system counts it. A
    candidate that refuses the source gets a row with its last line under "failed".
    """
    bits = [] if q_bits is None else ["--q-bits", str(q_bits)]
    commands = {
        "ours": ["mlx_kda", "convert", str(source), "OUT", *bits],
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
                taken[name].append(timed_process(command))
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


def timed_process(command: list[str]) -> tuple[float, int]:
    """(seconds, peak resident bytes) of ``python -m command``, OUT standing for a new folder."""
    with tempfile.TemporaryDirectory(prefix="mlx-kda-bench-") as folder:
        out, peak = Path(folder) / "out", Path(folder) / "peak"
        told = [str(out) if a == "OUT" else a for a in command]
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, memory.__file__, str(peak), *told],
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="folder of the checkpoint")
    parser.add_argument(
        "--q-bits", type=options.one_of(*BITS), metavar="N", help="quantise to N bits"
    )
    count(parser, "--samples", 3, "conversions by each")
    add_output(parser)


def main(args: argparse.Namespace) -> int:
    loading.check_folder(args.source)
    found = rows(Path(args.source), q_bits=args.q_bits, samples=args.samples)
    return measure(BENCHMARK, found, args)


if __name__ == "__main__":
    sys.exit(run(__doc__, add_arguments, main))
