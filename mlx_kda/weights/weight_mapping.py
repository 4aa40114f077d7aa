"""How a checkpoint's tensors become a model's: steps laid out from headers before any data is read.

Each step names the source tensors it reads and the tensors it makes, so the output's size, its
shards and what is left over are known beforehand, and only one step's tensors are ever in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..errors import CheckpointError
from ..format import listed
from .quantization import PARTS, quantization_of
from .safetensors import FLOATS, Pieces, Read, Spec

PIECE_BYTES = 4_000_000  # of a stack, made at a time; a larger tensor alone, without a copy
Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, what is being done


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
class WeightMapping:
    """What becomes of every tensor of a checkpoint."""

    steps: list[Step] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)  # source tensor -> why it is not needed
    quantized: dict[str, dict] = field(
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
            if path not in self.quantized or part == "bias":  # a map's own, not the packing's
                count += spec.size
            elif part == "weight":
                count += spec.size * 32 // self.quantized[path]["bits"]
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


class MappingBuilder:
    """Takes source tensors one by one; `finish` fails if any is left over or was not found."""

    def __init__(self, tensors: Mapping[str, Spec]):
        self.left: dict[str, Spec] = dict(tensors)
        self.missing: list[str] = []
        self.mapping = WeightMapping()

    def has(self, name: str) -> bool:
        """Whether a source tensor is there and not yet taken."""
        return name in self.left

    def add(self, step: Step) -> None:
        """Take a step's sources and keep the step."""
        for name in step.sources:
            del self.left[name]
        self.mapping.steps.append(step)

    def drop(self, name: str, reason: str) -> None:
        """Leave a source tensor out on purpose."""
        del self.left[name]
        self.mapping.dropped[name] = reason

    def first(self, names: Sequence[str]) -> str | None:
        """The first of several spellings that is there; None, and the name noted, if none is."""
        for name in names:
            if name in self.left:
                return name
        self.missing.append(names[0] if len(names) == 1 else f"{names[0]} (or {names[-1]})")
        return None

    def floats(self, name: str, shapes: Sequence[tuple[int, ...]]) -> Spec:
        """The spec of a floating-point source tensor that must have one of the shapes."""
        spec = self.left[name]
        if spec.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(
                f"{name} has shape {list(spec.shape)}, the config asks for {wanted}"
            )
        if spec.dtype not in FLOATS:
            kind = str(spec.dtype).removeprefix("mlx.core.")
            raise CheckpointError(f"{name} is stored as {kind}, not as a 16- or 32-bit float")
        return spec

    def tensor(self, name: str, shape: tuple[int, ...], *aliases: str) -> None:
        """A tensor that is taken over as it is."""
        if source := self.first((name, *aliases)):
            self.add(copy_step(source, name, self.floats(source, [shape])))

    def weight(self, path: str, shape: tuple[int, ...], *aliases: str) -> None:
        """The weight of a linear map, plain or quantised by MLX (with scales and biases)."""
        for source in (path, *aliases):
            if self.has(f"{source}.scales"):
                return self.quantized(path, shape, source)
        return self.tensor(f"{path}.weight", shape, *(f"{alias}.weight" for alias in aliases))

    def quantized(self, path: str, shape: tuple[int, ...], source: str) -> None:
        """A weight that MLX quantised: packed words, scales, and what the mode adds."""
        self.mapping.quantized[path] = quantization_of(self.left, source, shape)
        for part in PARTS:
            name = f"{source}.{part}"
            if self.has(name):
                self.add(copy_step(name, f"{path}.{part}", self.left[name]))

    def finish(self) -> WeightMapping:
        """The whole mapping; CheckpointError naming what is missing or left over."""
        if self.missing:
            raise CheckpointError(f"the checkpoint lacks {listed(self.missing)}")
        if self.left:
            raise CheckpointError(
                f"the checkpoint holds tensors that this model does not use: {listed(self.left)}"
            )
        return self.mapping
