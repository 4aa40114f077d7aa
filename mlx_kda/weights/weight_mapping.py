"""Accounts for every tensor of a checkpoint while a family's mapping is laid out (case D7)."""

from collections.abc import Mapping as MappingType
from collections.abc import Sequence

import mlx.core as mx

from ..errors import CheckpointError
from .steps import Mapping, Step, copy_step
from .tensor_files import Spec

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
PARTS = ("weight", "scales", "biases", "global_scale")  # of a packed weight
SHOWN = 4  # names spelled out in an error; the rest are counted


class Builder:
    """Takes source tensors one by one; `finish` fails if any is left over or was not found."""

    def __init__(self, tensors: MappingType[str, Spec]):
        self.left: dict[str, Spec] = dict(tensors)
        self.missing: list[str] = []
        self.mapping = Mapping()

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
                return self.packed(path, shape, source)
        return self.tensor(f"{path}.weight", shape, *(f"{alias}.weight" for alias in aliases))

    def packed(self, path: str, shape: tuple[int, ...], source: str) -> None:
        """A weight that MLX quantised: packed words, scales, and what the mode adds."""
        self.mapping.packed[path] = quantization_of(self, source, shape)
        for part in PARTS:
            name = f"{source}.{part}"
            if self.has(name):
                self.add(copy_step(name, f"{path}.{part}", self.left[name]))

    def finish(self) -> Mapping:
        """The whole mapping; CheckpointError naming what is missing or left over."""
        if self.missing:
            raise CheckpointError(f"the checkpoint lacks {listed(self.missing)}")
        if self.left:
            raise CheckpointError(
                f"the checkpoint holds tensors that this model does not use: {listed(self.left)}"
            )
        return self.mapping


def quantization_of(builder: Builder, path: str, shape: tuple[int, ...]) -> dict:
    """Bits, group size and mode of a weight that MLX packed, read off its shapes.

    `shape` is that of the plain weight. CheckpointError where the shapes fit no mode.
    """
    width = shape[-1]
    weight = builder.left.get(f"{path}.weight")
    scales = builder.left[f"{path}.scales"]
    affine = builder.has(f"{path}.biases")
    if weight is None:
        raise CheckpointError(f"the checkpoint holds {path}.scales but no {path}.weight")
    words = weight.shape[-1] if weight.shape else 0
    groups = scales.shape[-1] if scales.shape else 0
    bits = words * 32 // width
    group_size = width // groups if groups else 0
    modes = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
    mode = "affine" if affine else modes.get((bits, group_size))
    fits = (
        weight.dtype == mx.uint32
        and weight.shape == (*shape[:-1], width * bits // 32)
        and scales.shape == (*shape[:-1], groups)
        and group_size * groups == width
        and (not affine or builder.left[f"{path}.biases"].shape == scales.shape)
        and (affine or scales.dtype == mx.uint8)
    )
    if mode is None or not fits:
        raise CheckpointError(
            f"{path} is quantised in a layout that MLX does not have: weight {list(weight.shape)}, "
            f"scales {list(scales.shape)} for a matrix of {list(shape)}"
        )
    return {"group_size": group_size, "bits": bits, "mode": mode}


def listed(names) -> str:
    """A few names and the count of the rest, for one line."""
    names = list(names)
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
