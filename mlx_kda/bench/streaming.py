"""Whether conversions keep their promises: memory, time, the same bits, and going on after a kill.

    mlx-kda bench streaming FOLDER --report docs/conversion.md

makes a synthetic checkpoint of 4 GB in FOLDER (and removes it), converts it to bfloat16 and to
4 bits, and writes the page. Every conversion is a process of its own, and reports the highest
resident memory that the operating system counted for it.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..format import size as words
from .streaming_tasks import KILL_SHARD_BYTES, SHARD_BYTES, killed, measured

RECIPES = {"bfloat16": None, "4 bits": 4}
SLACK = 1_000_000_000


def tensor_hashes(folder: Path) -> dict[str, str]:
    """Tensor name -> SHA-256 of dtype, shape and bytes."""
    from ..weights.safetensors import read_bytes
    from ..weights.source import read_tensors

    hashes = {}
    for name, stored in read_tensors(folder).items():
        digest = hashlib.sha256(f"{stored.dtype} {stored.shape}".encode())
        digest.update(read_bytes(stored))
        hashes[name] = digest.hexdigest()
    return hashes


def file_hashes(folder: Path) -> dict[str, str]:
    """File name -> SHA-256."""
    from ..convert.resume import file_hash

    return {path.name: str(file_hash(path)) for path in sorted(folder.iterdir())}


def largest_layer(source: Path) -> int:
    """Bytes of the largest layer."""
    from ..weights.source import read_tensors

    sizes: dict[str, int] = {}
    for name, stored in read_tensors(source).items():
        layer = ".".join(name.split(".")[:3])
        sizes[layer] = sizes.get(layer, 0) + stored.nbytes
    return max(sizes.values())


def run(source: Path, work: Path, samples: int, say: Callable[[str], None]) -> Iterator[dict]:
    """One row a recipe: times, peaks, whether the bits and the files after kills are the same."""
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
                say(f"{recipe}, {task}: {found['seconds']:.1f} s, {words(found['peak'])}")
                if task == "ours":
                    peaks.append(found)
            shutil.rmtree(work / "plain")
        whole = measured("at-once", source, work / "at-once", bits)
        say(f"{recipe}, at once: {whole['seconds']:.1f} s, {words(whole['peak'])}")
        same = tensor_hashes(work / "ours") == tensor_hashes(work / "at-once")
        shutil.rmtree(work / "at-once")
        size = sum(path.stat().st_size for path in (work / "ours").iterdir())
        seconds = {task: sorted(found)[len(found) // 2] for task, found in times.items()}
        row: dict[str, Any] = {
            "recipe": recipe,
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


def measure(
    work: Path, layers: int, experts: int, samples: int, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Make the checkpoint in a folder of its own, and measure; the folder is gone at the end.

    Every row holds what the source was, too.
    """
    from .synthetic import write_synthetic

    source = work / "source"
    try:
        work.mkdir(parents=True)
        nbytes = write_synthetic(source, layers=layers, experts=experts)
        say(f"wrote {words(nbytes)}")
        facts = {
            "source_bytes": nbytes,
            "layers": layers,
            "experts": experts,
            "source_files": len(list(source.glob("*.safetensors"))),
            "layer_bytes": largest_layer(source),
        }
        for row in run(source, work, samples, say):
            yield row | facts
    except OSError as error:
        raise UserError(f"{work} cannot be used: {error.strerror}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
