"""Whether conversions keep their promises: memory, time, the same bits, and going on after a kill.

    python -m mlx_kda.bench.streaming FOLDER --report docs/conversion.md

makes a synthetic checkpoint of 4 GB in FOLDER (and removes it), converts it to bfloat16 and to
4 bits, and writes the page. Every conversion is a process of its own, and reports the highest
resident memory that the operating system counted for it.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError

RECIPES = {"bfloat16": None, "4 bits": 4}
SHARD_BYTES = 500_000_000
KILL_SHARD_BYTES = 100_000_000  # smaller, so that a kill finds some files finished
LIMIT, SLACK = 1.3, 1_000_000_000
KILLS = 10


def peak() -> int:
    """Highest resident bytes of this process so far, as the system counts them.

    Not ru_maxrss on Linux: a child inherits that of the process that started it.
    """
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# --- what runs in a process of its own: (source, out, bits, bytes of an output file) -> nothing


def ours(source: Path, out: Path, bits: int | None, shard_bytes: int) -> None:
    """`mlx-kda convert`."""
    from ..convert import convert

    convert(source, out, q_bits=bits, shard_bytes=shard_bytes, resume=True)


def plain(source: Path, out: Path, bits: int | None, _: int) -> None:
    """The least that could be done: each file copied, or its matrices quantised one by one.

    No stacking, no check, no checksum; every file is synced.
    """
    import mlx.core as mx

    from ..convert.writing import array_bytes

    out.mkdir()
    for file in sorted(source.glob("*.safetensors")):
        with (out / file.name).open("wb") as target:
            if bits is None:
                with file.open("rb") as origin:
                    shutil.copyfileobj(origin, target, 16_000_000)
            else:
                arrays = mx.load(str(file))
                while arrays:
                    array = arrays.pop(next(iter(arrays)))
                    packs = array.ndim == 2 and array.shape[1] % 64 == 0
                    for part in mx.quantize(array, 64, bits) if packs else (array,):
                        target.write(array_bytes(part))
            target.flush()
            os.fsync(target.fileno())


def at_once(source: Path, out: Path, bits: int | None, _: int) -> None:
    """The same recipe with the whole model in memory, saved by MLX in one file."""
    import mlx.core as mx

    from ..convert.layout import Wish, lay_out
    from ..convert.source import open_source

    layout = lay_out(open_source(source), Wish(q_bits=bits))
    arrays: dict[str, mx.array] = {}
    for file in sorted(source.glob("*.safetensors")):
        arrays |= mx.load(str(file))
    made: dict[str, mx.array] = {}
    for step in layout.steps:
        made |= step.run(arrays.__getitem__)
    out.mkdir()
    mx.save_safetensors(str(out / "model.safetensors"), made, {"format": "mlx"})


TASKS: dict[str, Callable[[Path, Path, int | None, int], None]] = {
    "ours": ours,
    "plain": plain,
    "at-once": at_once,
}


def command(
    task: str, source: Path, out: Path, bits: int | None, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """The command line of one task."""
    return [
        *(sys.executable, "-m", "mlx_kda.bench.streaming", "--task", task),
        *(str(source), str(out), str(bits or 0), str(shard_bytes)),
    ]


def measured(
    task: str, source: Path, out: Path, bits: int | None, shard_bytes: int = SHARD_BYTES
) -> dict[str, float]:
    """Seconds of a task, its peak bytes, and those that the process had before it."""
    shutil.rmtree(out, ignore_errors=True)
    line = command(task, source, out, bits, shard_bytes)
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{task} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


def _task(task: str, source: str, out: str, bits: int, shard_bytes: int) -> None:
    import mlx.core as mx

    mx.eval(mx.quantize(mx.zeros((64, 64))))
    idle, start, busy = peak(), time.perf_counter(), time.process_time()
    TASKS[task](Path(source), Path(out), bits or None, shard_bytes)
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    print(json.dumps({"seconds": seconds, "cpu": cpu, "idle": idle, "peak": peak()}))


# --- what is compared


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


def killed(source: Path, out: Path, bits: int, seconds: float, seed: int = 0) -> list[int]:
    """Convert, killed `KILLS` times at random moments, then to the end; files finished at each.

    `seconds` is what the whole takes: each run gets up to 1.4 tenths of it.
    """
    shutil.rmtree(out, ignore_errors=True)
    draw, finished = random.Random(seed), []
    partial = out.with_name(out.name + ".partial")
    line = command("ours", source, out, bits, KILL_SHARD_BYTES)
    for _ in range(KILLS):
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.8 + draw.uniform(0, 1.4 * seconds / KILLS))
        process.send_signal(signal.SIGKILL)
        process.wait()
        finished.append(len(list((out if out.exists() else partial).glob("model-*.safetensors"))))
        if out.exists():
            break
    subprocess.run(line, check=True, capture_output=True)
    return finished


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


def page(facts: dict[str, Any], about: dict[str, Any], rows: list[dict]) -> str:
    """The page of results."""
    from ..convert.report import in_words

    yes = {True: "yes", False: "NO"}
    lines = [
        "# Conversion, measured",
        "",
        f"Written by `{about['command']}` on {about['date']}, commit {about['commit']}.",
        f"Machine: {about['chip']}, {about['cores']} cores, {about['memory_gb']} GB, "
        f"{about['system']}, MLX on its {about['device']}. It is shared and its disk is slow, so "
        "times are quoted as ratios of runs that took turns. Not an Apple GPU.",
        "",
        f"Source: a synthetic checkpoint of {in_words(facts['bytes'])}, {facts['layers']} layers, "
        f"{facts['experts']} experts, {facts['files']} files; largest layer "
        f"{in_words(facts['layer'])}; output files of {in_words(SHARD_BYTES)}, for the kills of "
        f"{in_words(KILL_SHARD_BYTES)}.",
        "",
        "| | " + " | ".join(row["recipe"] for row in rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    table: list[tuple[str, Callable[[dict], str]]] = [
        ("output", lambda r: in_words(r["output_bytes"])),
        ("peak memory (system's count)", lambda r: in_words(r["peak"])),
        ("of that, an idle process", lambda r: in_words(r["idle"])),
        ("bound: a layer + a file + 1 GB", lambda r: in_words(r["bound"])),
        ("peak with the model in memory", lambda r: in_words(r["at_once_peak"])),
        ("seconds, median", lambda r: f"{r['seconds']:.1f}"),
        ("plain copy and quantisation, seconds", lambda r: f"{r['plain_seconds']:.1f}"),
        ("seconds of all processors, the same", lambda r: f"{r['cpu']:.1f}, {r['plain_cpu']:.1f}"),
        ("ratio (bound 1.3)", lambda r: f"{r['ratio']:.2f}"),
        ("ratios of the runs", lambda r: ", ".join(f"{x:.2f}" for x in r["ratios"])),
        ("tensors bit for bit those of all at once", lambda r: yes[r["same_bits"]]),
        ("kill -9 at random moments", lambda r: str(r["kills"])),
        ("files finished at each", lambda r: ", ".join(map(str, r["finished"]))),
        ("files after --resume identical", lambda r: yes[r["same_files"]]),
    ]
    lines += [f"| {name} | " + " | ".join(map(show, rows)) + " |" for name, show in table]
    lines += [
        "",
        "`plain copy and quantisation` reads every file and writes it again, or its matrices",
        "quantised one by one as they are stored: no stacking of experts, no check for NaN, no",
        "checksums. A conversion has all of these, and the SHA-256 of source and output.",
        "",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m mlx_kda.bench.streaming")
    parser.add_argument("work", help="folder for the checkpoint and the outputs, about 20 GB")
    parser.add_argument("--report", help="Markdown file to write")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=3)
    args = parser.parse_args(arguments)
    from ..files import write_text
    from . import machine
    from .synthetic import write_synthetic

    work = Path(args.work) / "mlx-kda-streaming"
    work.mkdir(parents=True)
    source = work / "source"
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
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
    if sys.argv[1:2] == ["--task"]:
        _task(*sys.argv[2:5], *map(int, sys.argv[5:7]))
    else:
        sys.exit(main())
