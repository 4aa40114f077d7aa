"""The conversions that `streaming` measures, each in a process of its own.

    python -m mlx_kda.bench.streaming_tasks TASK SOURCE OUT BITS BYTES

prints the seconds that one took, and the highest resident memory that the system counted for it.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import UserError
from .memory import peak_resident

SHARD_BYTES = 500_000_000
KILL_SHARD_BYTES = 100_000_000  # smaller, so that a kill finds some files finished
KILLS = 10


def ours(source: Path, out: Path, bits: int | None, shard_bytes: int) -> None:
    """`mlx-kda convert`."""
    from ..convert import convert

    convert(source, out, q_bits=bits, shard_bytes=shard_bytes, resume=True)


def plain(source: Path, out: Path, bits: int | None, _: int) -> None:
    """The least that could be done: each file copied, or its matrices quantised one by one.

    No stacking, no check, no checksum; every file is synced.
    """
    import mlx.core as mx

    from ..weights.safetensors_writer import array_bytes

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

    from ..convert.conversion_plan import plan_conversion
    from ..convert.recipe import ConvertOptions
    from ..weights.source import open_source

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


# (source, out, bits, bytes of an output file) -> nothing
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
        *(sys.executable, "-m", "mlx_kda.bench.streaming_tasks", task),
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

    `seconds` is what the whole takes: each run gets up to 1.4 tenths of it.
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
    import mlx.core as mx

    mx.eval(mx.quantize(mx.zeros((64, 64))))
    idle, start, busy = peak_resident(), time.perf_counter(), time.process_time()
    TASKS[task](Path(source), Path(out), bits or None, shard_bytes)
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    print(json.dumps({"seconds": seconds, "cpu": cpu, "idle": idle, "peak": peak_resident()}))


if __name__ == "__main__":
    _task(*sys.argv[1:4], *map(int, sys.argv[4:6]))
