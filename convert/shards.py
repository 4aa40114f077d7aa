"""The weight files of an output: which tensors go into which, and how they are written."""

import hashlib
from collections.abc import Iterator

import mlx.core as mx

from ..files import new_file
from ..weights.safetensors import Pieces, Spec
from ..weights.safetensors_writer import write_file
from ..weights.source import Reader
from ..weights.weight_mapping import Progress
from .journal import Journal
from .layout import Layout
from .quantise import Finished

SHARD_BYTES = 5_000_000_000


def write_weights(
    layout: Layout, shards: dict[str, list[Finished]], journal: Journal, progress: Progress | None
) -> None:
    """Write the weight files that are not finished, and note each in the journal.

    Only the tensors of one step are in memory at a time, and what is read ahead.
    """
    todo = {name: steps for name, steps in shards.items() if name not in journal.files}
    total = layout.nbytes
    finished = (steps for name, steps in shards.items() if name not in todo)
    done = sum(step.nbytes for steps in finished for step in steps)
    order = layout.view.stored(step for steps in todo.values() for step in steps)
    waiting = layout.waiting_bytes
    with Reader(layout.source, order, waiting) as reader:
        read = layout.view.reading(reader)

        def arrays(steps: list[Finished]) -> Iterator[tuple[str, Pieces]]:
            nonlocal done
            for step in steps:
                yield from step.stream(read)
                if mx.get_cache_memory() > waiting:
                    mx.clear_cache()
                done += step.nbytes
                if progress and step.outputs:
                    progress(done, total, next(iter(step.outputs)))

        for name, steps in todo.items():
            with new_file(journal.folder / name) as temporary:
                digest = write_file(temporary, outputs_of(steps), arrays(steps), waiting=waiting)
                size = temporary.stat().st_size
            sources = layout.view.stored(steps)
            journal.record(
                name,
                {
                    "bytes": size,
                    "sha256": digest,
                    "holds": holds(steps),
                    "sources": {key: reader.digests[key] for key in sources},
                },
            )


def holds(steps: list[Finished]) -> str:
    """A hash of the names, shapes and dtypes that a file of some steps holds."""
    lines = (f"{name} {spec.shape} {spec.dtype}\n" for name, spec in outputs_of(steps).items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def outputs_of(steps: list[Finished]) -> dict[str, Spec]:
    """Every tensor that some steps make, in order."""
    return {name: spec for step in steps for name, spec in step.outputs.items()}


def into_shards(steps: list[Finished], shard_bytes: int) -> dict[str, list[Finished]]:
    """Group steps in order, by file, so that each stays within its size; no step is split."""
    shards: list[list[Finished]] = [[]]
    size = 0
    for step in steps:
        if size + step.nbytes > shard_bytes and size:
            shards.append([])
            size = 0
        shards[-1].append(step)
        size += step.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    count = len(shards)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }
