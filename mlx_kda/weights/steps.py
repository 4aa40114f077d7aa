"""A conversion as a list of steps, laid out from headers alone before any data is read.

Each step names the source tensors it reads and the tensors it makes. So the output's size, its
shards and what is left over are known beforehand, and only one step's tensors are ever in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from .tensor_files import Spec

PIECE_BYTES = 4_000_000  # of a stack, made at a time; a larger tensor alone, without a copy
Read = Callable[[str], mx.array]
Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, what is being done
Pieces = Iterator[mx.array]  # a tensor, some rows at a time


@dataclass(frozen=True)
class Step:
    """Makes the tensors `outputs` from the source tensors `sources`.

    A step that stacks tensors into one has `pieces` too, which makes a few rows of it at a time.
    `by_rows` says that a row of what it makes needs the same row of its sources and no more.
    """

    sources: tuple[str, ...]
    outputs: dict[str, Spec]
    run: Callable[[Read], dict[str, mx.array]]
    pieces: Callable[[Read], Pieces] | None = None
    by_rows: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it makes."""
        return sum(spec.nbytes for spec in self.outputs.values())


@dataclass
class Mapping:
    """What becomes of every tensor of a checkpoint."""

    steps: list[Step] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)  # source tensor -> why it is not needed
    packed: dict[str, dict] = field(
        default_factory=dict
    )  # path -> bits, group size, mode it came in

    @property
    def outputs(self) -> dict[str, Spec]:
        """Every tensor that the steps make, in order."""
        return {name: spec for step in self.steps for name, spec in step.outputs.items()}

    @property
    def parameters(self) -> int:
        """Number of weights, a packed one counted as what it stands for."""
        count = 0
        for name, spec in self.outputs.items():
            path, _, part = name.rpartition(".")
            if path not in self.packed or part == "bias":  # a map's own, not the packing's
                count += spec.size
            elif part == "weight":
                count += spec.size * 32 // self.packed[path]["bits"]
        return count


def copy_step(source: str, name: str, spec: Spec) -> Step:
    """A step that takes a tensor as it is, under another name."""
    return Step((source,), {name: spec}, lambda read: {name: read(source)}, by_rows=True)


def stack_step(sources: Sequence[str], name: str, spec: Spec) -> Step:
    """A step that stacks tensors of this spec along a new first axis."""
    at_a_time = max(1, PIECE_BYTES // max(1, spec.nbytes))

    def pieces(read: Read) -> Pieces:
        for start in range(0, len(sources), at_a_time):
            parts = [read(source) for source in sources[start : start + at_a_time]]
            yield parts[0][None] if len(parts) == 1 else mx.stack(parts)

    return Step(
        tuple(sources),
        {name: Spec((len(sources), *spec.shape), spec.dtype)},
        lambda read: {name: mx.stack([read(source) for source in sources])},
        pieces,
    )
