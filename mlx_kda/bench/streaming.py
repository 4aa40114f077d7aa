"""Whether conversions keep their promises: memory, time, the same bits, and going on after a kill.

    python -m mlx_kda.bench.streaming FOLDER --report docs/conversion.md

makes a synthetic checkpoint of 4 GB in FOLDER (and removes it), converts it to bfloat16 and to
4 bits, and writes the page. Every conversion is a process of its own, and reports the highest
resident memory that the operating system counted for it.
"""

import argparse
import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from .streaming_page import page
from .streaming_tasks import KILL_SHARD_BYTES, SHARD_BYTES, killed, measured

RECIPES = {"bfloat16": None, "4 bits": 4}
LIMIT, SLACK = 1.3, 1_000_000_000


def tensor_hashes(folder: Path) -> dict[str, str]:
    """Tensor name -> SHA-256 of dtype, shape and bytes."""
    from ..convert.source import read_tensors
    from ..convert.tensor_files import read_bytes

    hashes = {}
    for name, stored in read_tensors(folder).items():
        digest = hashlib.sha256(f"{stored.dtype} {stored.shape}".encode())
        digest.update(read_bytes(stored))
        hashes[name] = digest.hexdigest()
    return hashes


def file_hashes(folder: Path) -> dict[str, str]:
    """File name -> SHA-256."""
    from ..convert.journal import file_hash

    return {path.name: str(file_hash(path)) for path in sorted(folder.iterdir())}


def largest_layer(source: Path) -> int:
    """Bytes of the largest layer."""
    from ..convert.source import read_tensors

    sizes: dict[str, int] = {}
    for name, stored in read_tensors(source).items():
        layer = ".".join(name.split(".")[:3])
        sizes[layer] = sizes.get(layer, 0) + stored.nbytes
    return max(sizes.values())


def run(source: Path, work: Path, samples: int, say: Callable[[str], None]) -> Iterator[dict]:
    """One row a recipe: times, peaks, whether the bits and the files after kills are the same."""
    layer = largest_layer(source)
    for words, bits in RECIPES.items():
        times: dict[str, list[float]] = {"ours": [], "plain": []}
        cpu: dict[str, float] = {}
        peaks = []
        for _ in range(samples):
            for task in times:
                found = measured(task, source, work / task, bits)
                times[task].append(found["seconds"])
                cpu[task] = min(found["cpu"], cpu.get(task, found["cpu"]))
                say(f"{words}, {task}: {found['seconds']:.1f} s, {found['peak'] / 1e6:.0f} MB")
                if task == "ours":
                    peaks.append(found)
            shutil.rmtree(work / "plain")
        whole = measured("at-once", source, work / "at-once", bits)
        say(f"{words}, at once: {whole['seconds']:.1f} s, {whole['peak'] / 1e6:.0f} MB")
        same = tensor_hashes(work / "ours") == tensor_hashes(work / "at-once")
        shutil.rmtree(work / "at-once")
        size = sum(path.stat().st_size for path in (work / "ours").iterdir())
        seconds = {task: sorted(found)[len(found) // 2] for task, found in times.items()}
        row: dict[str, Any] = {
            "recipe": words,
            "output_bytes": size,
            "seconds": seconds["ours"],
            "plain_seconds": seconds["plain"],
            "ratio": seconds["ours"] / seconds["plain"],
            "ratios": [a / b for a, b in zip(times["ours"], times["plain"], strict=True)],
            "cpu": cpu["ours"],
            "plain_cpu": cpu["plain"],
            "peak": max(found["peak"] for found in peaks),
            "idle": max(found["idle"] for found in peaks),
            "bound": layer + SHARD_BYTES + SLACK,
            "at_once_peak": whole["peak"],
            "same_bits": same,
        }
        measured("ours", source, work / "ours", bits, KILL_SHARD_BYTES)
        wanted = file_hashes(work / "ours")
        finished = killed(source, work / "killed", bits, seconds["ours"], seed=bits or 0)
        row["kills"], row["finished"] = len(finished), finished
        row["same_files"] = file_hashes(work / "killed") == wanted
        for name in ("ours", "killed"):
            shutil.rmtree(work / name)
        yield row


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m mlx_kda.bench.streaming")
    parser.add_argument("work", help="folder for the checkpoint and the outputs, about 20 GB")
    parser.add_argument("--report", help="Markdown file to write")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=3)
    args = parser.parse_args(arguments)
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    from ..cli.stopping import ending

    try:
        with ending():  # SIGTERM too: the folder goes
            return measure(args, say)
    except UserError as error:
        say(f"{parser.prog}: {error}")
        return 2


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Make the checkpoint, measure, write the page; 0 if every promise was kept, else 1."""
    from ..files import write_text
    from . import machine
    from .synthetic import write_synthetic

    work = Path(args.work) / "mlx-kda-streaming"
    if work.exists():
        raise UserError(f"{work} is there already: remove it, or name another folder")
    work.mkdir(parents=True)
    source = work / "source"
    try:
        nbytes = write_synthetic(source, layers=args.layers, experts=args.experts)
        say(f"wrote {nbytes / 1e9:.2f} GB")
        rows = list(run(source, work, args.samples, say))
        facts = {
            "bytes": nbytes,
            "layers": args.layers,
            "experts": args.experts,
            "files": len(list(source.glob("*.safetensors"))),
            "layer": largest_layer(source),
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)
    about = machine.describe("python -m mlx_kda.bench.streaming FOLDER --report FILE")
    text = page(facts, about, rows)
    print(text)
    if args.report:
        write_text(Path(args.report), text)
    kept = all(r["same_bits"] and r["same_files"] and r["peak"] <= r["bound"] for r in rows)
    return 0 if kept and all(row["ratio"] <= LIMIT for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
