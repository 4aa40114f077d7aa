"""How a checkpoint's tensors become a model's: steps laid out from headers before any data is read.

Each step names the source tensors it reads and the tensors it makes, so the output's size, its
shards and what is left over are known beforehand, and only one step's tensors are ever in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..errors import CheckpointError
from ..format import listed
from .quantization import PARTS, Quantization, quantization_of
from .safetensors import FLOATS, Pieces, Read, Spec

PIECE_BYTES = 4_000_000  # of a stack, made at a time; a larger tensor alone, without a copy
Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, what is being done


@dataclass(frozen=True)
class Step:
    """Makes the tensors ``outputs`` from the source tensors ``sources``.

    A step that stacks tensors into one has ``pieces`` too, which makes a few rows at a time.
    With ``by_rows`` each row of an output needs only the same row of the sources.
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
    quantized: dict[str, Quantization] = field(default_factory=dict)

    @property
    def outputs(self) -> dict[str, Spec]:
        """Every tensor that the steps make, in order."""
        return {name: spec for step in self.steps for name, spec in step.outputs.items()}

    @property
    def parameters(self) -> int:
        """Number of weights; of a quantised one, those of the plain weight."""
        count = 0
        for name, spec in self.outputs.items():
            path, _, part = name.rpartition(".")
            if path not in self.quantized or part == "bias":  # the linear map's own bias
                count += spec.size
            elif part == "weight":
                count += spec.size * 32 // self.quantized[path].bits
        return count


def copy_step(source: str, name: str, spec: Spec) -> Step:
    """A step that copies a tensor under another name."""
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
    """Takes source tensors one by one; ``finish`` fails if one is left over or missing."""

    def __init__(self, tensors: Mapping[str, Spec]):
        self.left: dict[str, Spec] = dict(tensors)
        self.missing: list[str] = []
        self.mapping = WeightMapping()

    def has(self, name: str) -> bool:
        """Whether there is such a source tensor, not yet taken."""
        return name in self.left

    def add(self, step: Step) -> None:
        """Add a step and take its sources."""
        for name in step.sources:
            del self.left[name]
        self.mapping.steps.append(step)

    def drop(self, name: str, reason: str) -> None:
        """Take a source tensor that is not needed."""
        del self.left[name]
        self.mapping.dropped[name] = reason

    def first(self, names: Sequence[str]) -> str | None:
        """The first of several names that there is; None, noted as missing, if there is none."""
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
        """Copy a tensor, under the first of its names that there is."""
        if source := self.first((name, *aliases)):
            self.add(copy_step(source, name, self.floats(source, [shape])))

    def weight(self, path: str, shape: tuple[int, ...], *aliases: str) -> None:
        """Copy the weight of a linear map, plain or quantised by MLX (with scales and biases)."""
        for source in (path, *aliases):
            if self.has(f"{source}.scales"):
                return self.quantized(path, shape, source)
        return self.tensor(f"{path}.weight", shape, *(f"{alias}.weight" for alias in aliases))

    def quantized(self, path: str, shape: tuple[int, ...], source: str) -> None:
        """Copy a weight that MLX quantised, with its scales and what else the mode has."""
        self.mapping.quantized[path] = quantization_of(self.left, source, shape)
        for part in PARTS:
            name = f"{source}.{part}"
            if self.has(name):
                self.add(copy_step(name, f"{path}.{part}", self.left[name]))

    def finish(self) -> WeightMapping:
        """The whole mapping; raises CheckpointError naming what is missing or left over."""
        if self.missing:
            raise CheckpointError(f"the checkpoint lacks {listed(self.missing)}")
        if self.left:
            raise CheckpointError(
                f"the checkpoint holds tensors that this model does not use: {listed(self.left)}"
            )
        return self.mapping
