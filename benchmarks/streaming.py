"""Whether conversions keep their bounds: memory, time, the same bits, resuming after a kill.

    python benchmarks/streaming.py FOLDER --report docs/conversion.md

makes a synthetic checkpoint of 4 GB in FOLDER (and removes it), converts it to bfloat16 and to
4 bits, and writes the page. Every conversion is a process of its own, which reports the highest
resident memory that the operating system counted for it. Exits with 1 where a bound was exceeded.
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

import mlx.core as mx
from common import add_output, count, run
from memory import peak_resident
from synthetic import write_synthetic

from mlx_kda.bench.results import Benchmark, columns
from mlx_kda.cli.measure import measure
from mlx_kda.cli.output import note
from mlx_kda.convert import convert
from mlx_kda.convert.conversion_plan import plan_conversion
from mlx_kda.convert.recipe import ConvertOptions
from mlx_kda.convert.resume import file_hash
from mlx_kda.errors import UserError
from mlx_kda.format import size
from mlx_kda.weights.safetensors import read_bytes
from mlx_kda.weights.safetensors_writer import array_bytes
from mlx_kda.weights.source import open_source, read_tensors

BENCHMARK = Benchmark(
    "streaming",
    "Whether conversions keep their bounds",
    columns(
        "recipe seconds plain_seconds ratio peak bound same_bits same_files",
        plain_seconds="seconds of a plain copy",
        peak="peak bytes",
        bound="bound of it",
        same_bits="same bits",
        same_files="same files after kills",
    ),
)
LIMIT = 1.3  # times the seconds of a plain copy and quantisation
RECIPES = {"bfloat16": None, "4 bits": 4}
SLACK = 1_000_000_000
TASK = "--task"  # runs a task in a process that `measured` started
SHARD_BYTES = 500_000_000
KILL_SHARD_BYTES = 100_000_000  # smaller, so that a kill finds some files finished
KILLS = 10


def ours(source: Path, out: Path, bits: int | None, shard_bytes: int) -> None:
    """`mlx-kda convert`."""
    convert(source, out, q_bits=bits, shard_bytes=shard_bytes, resume=True)


def plain(source: Path, out: Path, bits: int | None, _: int) -> None:
    """The least work possible: each file copied, or its matrices quantised one by one.

    No stacking, no check, no checksum; every file is synced.
    """
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
    plan = plan_conversion(open_source(source), ConvertOptions(q_bits=bits))
    arrays: dict[str, mx.array] = {}
    for file in sorted(source.glob("*.safetensors")):
        arrays |= mx.load(str(file))
    made: dict[str, mx.array] = {}
    for step in plan.steps:
        for name, pieces in step.stream(arrays.__getitem__):
            made[name] = mx.concatenate(list(pieces))
    out.mkdir()
    mx.save_safetensors(str(out / "model.safetensors"), made, {"format": "mlx"})


# name -> task(source, out, bits, bytes of an output file)
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
        *(sys.executable, __file__, TASK, task),
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


def killed(source: Path, out: Path, bits: int, seconds: float, seed: int = 0) -> list[int]:
    """Convert, killed `KILLS` times at random moments, then to the end; files finished at each.

    ``seconds`` is the time of a whole run: each of these gets up to 1.4 tenths of it.
    """
    shutil.rmtree(out, ignore_errors=True)
    draw, finished = random.Random(seed), []
    partial = out.with_name(out.name + ".partial")
    line = command("ours", source, out, bits, KILL_SHARD_BYTES)
    for _ in range(KILLS):
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(0.8 + draw.uniform(0, 1.4 * seconds / KILLS))
        finally:  # also where this one is ended meanwhile
            process.send_signal(signal.SIGKILL)
            process.wait()
        finished.append(len(list((out if out.exists() else partial).glob("model-*.safetensors"))))
        if out.exists():
            break
    subprocess.run(line, check=True, capture_output=True)
    return finished


def _task(task: str, source: str, out: str, bits: int, shard_bytes: int) -> None:
    mx.eval(mx.quantize(mx.zeros((64, 64))))
    idle, start, busy = peak_resident(), time.perf_counter(), time.process_time()
    TASKS[task](Path(source), Path(out), bits or None, shard_bytes)
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    print(json.dumps({"seconds": seconds, "cpu": cpu, "idle": idle, "peak": peak_resident()}))


def tensor_hashes(folder: Path) -> dict[str, str]:
    """Tensor name -> SHA-256 of dtype, shape and bytes."""
    hashes = {}
    for name, stored in read_tensors(folder).items():
        digest = hashlib.sha256(f"{stored.dtype} {stored.shape}".encode())
        digest.update(read_bytes(stored))
        hashes[name] = digest.hexdigest()
    return hashes


def file_hashes(folder: Path) -> dict[str, str]:
    """File name -> SHA-256."""
    return {path.name: str(file_hash(path)) for path in sorted(folder.iterdir())}


def largest_layer(source: Path) -> int:
    """Bytes of the largest layer."""
    sizes: dict[str, int] = {}
    for name, stored in read_tensors(source).items():
        layer = ".".join(name.split(".")[:3])
        sizes[layer] = sizes.get(layer, 0) + stored.nbytes
    return max(sizes.values())


def compare(source: Path, work: Path, samples: int, log: Callable[[str], None]) -> Iterator[dict]:
    """Yield a row for each recipe: times, peaks, the same bits, the same files after kills."""
    layer = largest_layer(source)
    for recipe, bits in RECIPES.items():
        times: dict[str, list[float]] = {"ours": [], "plain": []}
        cpu: dict[str, float] = {}
        peaks = []
        for _ in range(samples):
            for task in times:
                found = measured(task, source, work / task, bits)
                times[task].append(found["seconds"])
                cpu[task] = min(found["cpu"], cpu.get(task, found["cpu"]))
                log(f"{recipe}, {task}: {found['seconds']:.1f} s, {size(found['peak'])}")
                if task == "ours":
                    peaks.append(found)
            shutil.rmtree(work / "plain")
        whole = measured("at-once", source, work / "at-once", bits)
        log(f"{recipe}, at once: {whole['seconds']:.1f} s, {size(whole['peak'])}")
        same = tensor_hashes(work / "ours") == tensor_hashes(work / "at-once")
        shutil.rmtree(work / "at-once")
        output = sum(path.stat().st_size for path in (work / "ours").iterdir())
        seconds = {task: sorted(found)[len(found) // 2] for task, found in times.items()}
        row: dict[str, Any] = {
            "recipe": recipe,
            "output_bytes": output,
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


def rows(
    work: Path, layers: int, experts: int, samples: int, log: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Write the checkpoint to a folder, convert it, and remove the folder; yields the rows.

    Every row also describes the checkpoint.
    """
    source = work / "source"
    try:
        work.mkdir(parents=True)
        nbytes = write_synthetic(source, layers=layers, experts=experts)
        log(f"wrote {size(nbytes)}")
        facts = {
            "source_bytes": nbytes,
            "layers": layers,
            "experts": experts,
            "source_files": len(list(source.glob("*.safetensors"))),
            "layer_bytes": largest_layer(source),
        }
        for row in compare(source, work, samples, log):
            yield row | facts
    except OSError as error:
        raise UserError(f"{work} cannot be used: {error.strerror}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def broken(rows: list[dict[str, Any]]) -> list[str]:
    """The bounds that were exceeded, in words; [] for none."""
    found = []
    for row in rows:
        name = row["recipe"]
        if row["peak"] > row["bound"]:
            found.append(f"{name}: {size(row['peak'])} at the peak, bound {size(row['bound'])}")
        if row["ratio"] > LIMIT:
            found.append(f"{name}: {row['ratio']:.2f} times a plain copy, bound {LIMIT}")
        if not row["same_bits"]:
            found.append(f"{name}: the tensors are not those of the model converted at once")
        if not row["same_files"]:
            found.append(f"{name}: the files after kills are not those of a run left alone")
    return found


def page(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """docs/conversion.md."""
    facts = rows[0]
    yes = {True: "yes", False: "NO"}
    lines = [
        "# Conversion, measured",
        "",
        f"Written by `{about['command']}` on {about['date']}, commit {about['commit']}.",
        f"Machine: {about['chip']}, {about['cores']} cores, {about['memory_gb']} GB, "
        f"{about['system']}, MLX on its {about['device']}. It is shared and its disk is slow, so "
        "times are quoted as ratios of runs that took turns. Not an Apple GPU.",
        "",
        f"Source: a synthetic checkpoint of {size(facts['source_bytes'])}, "
        f"{facts['layers']} layers, {facts['experts']} experts, {facts['source_files']} files; "
        f"largest layer {size(facts['layer_bytes'])}; output files of {size(SHARD_BYTES)}, for "
        f"the kills of {size(KILL_SHARD_BYTES)}.",
        "",
        "| | " + " | ".join(row["recipe"] for row in rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    table: list[tuple[str, Callable[[dict], str]]] = [
        ("output", lambda r: size(r["output_bytes"])),
        ("peak memory (system's count)", lambda r: size(r["peak"])),
        ("of that, an idle process", lambda r: size(r["idle"])),
        ("bound: a layer + a file + 1 GB", lambda r: size(r["bound"])),
        ("peak with the model in memory", lambda r: size(r["at_once_peak"])),
        ("seconds, median", lambda r: f"{r['seconds']:.1f}"),
        ("plain copy and quantisation, seconds", lambda r: f"{r['plain_seconds']:.1f}"),
        ("seconds of all processors, the same", lambda r: f"{r['cpu']:.1f}, {r['plain_cpu']:.1f}"),
        (f"ratio (bound {LIMIT})", lambda r: f"{r['ratio']:.2f}"),
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scratch", metavar="FOLDER", help="where the checkpoint and the outputs go, about 20 GB"
    )
    count(parser, "--layers", 40, "layers of the checkpoint")
    count(parser, "--experts", 64, "experts of a layer")
    count(parser, "--samples", 3, "conversions by each")
    add_output(parser, report=True)


def main(args: argparse.Namespace) -> int:
    work = Path(args.scratch) / "mlx-kda-streaming"
    if work.exists():
        raise UserError(f"{work} already exists: remove it, or name another folder")
    found = rows(work, args.layers, args.experts, args.samples, note)
    return measure(BENCHMARK, found, args, page=page, broken=broken)


if __name__ == "__main__":
    if sys.argv[1:2] == [TASK]:
        _task(*sys.argv[2:5], *map(int, sys.argv[5:7]))
    else:
        sys.exit(run(__doc__, add_arguments, main))
