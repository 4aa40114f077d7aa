"""Casting and quantising the tensors that a mapping makes, refusing values that are not finite."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..errors import UserError
from ..weights.quantization import Quantization
from ..weights.safetensors import FLOATS, Pieces, Read, Spec
from ..weights.weight_mapping import Step
from .recipe import Recipe

FLOAT32 = re.compile(r"\.(A_log|dt_bias|e_score_correction_bias|global_scale)$")


@dataclass(frozen=True)
class OutputStep:
    """A step of a mapping under a recipe: which tensors are written, and how they are made.

    ``stream`` yields (name, pieces) of each tensor; the pieces of one must be taken before the next
    tensor is asked for.
    """

    sources: tuple[str, ...]
    outputs: dict[str, Spec]
    stream: Callable[[Read], Iterator[tuple[str, Pieces]]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it makes."""
        return sum(spec.nbytes for spec in self.outputs.values())


def output_step(step: Step, dtype: mx.Dtype, recipe: Recipe | None) -> OutputStep:
    """The step with its outputs cast to the model's dtype and quantised by the recipe.

    Gate parameters and the router's bias stay float32. Streaming raises UserError with the
    tensor's name where a cast to float16 overflows or a value is not finite.
    """
    outputs: dict[str, Spec] = {}
    packings: dict[str, Quantization | None] = {}
    targets: dict[str, mx.Dtype] = {}
    for name, spec in step.outputs.items():
        if is_cast(name, spec):
            spec = Spec(spec.shape, dtype)
        targets[name] = spec.dtype
        packings[name] = packing = recipe.choose(name, spec) if recipe else None
        path = name.removesuffix(".weight")
        outputs |= packing.outputs(path, spec) if packing else {name: spec}

    def stream(read: Read) -> Iterator[tuple[str, Pieces]]:
        for name, pieces in made_pieces(step, read):
            if (packing := packings[name]) is None:
                yield name, _cast_all(name, pieces, targets[name])
            else:
                yield from _quantised(name, pieces, targets[name], packing, step.outputs[name])

    return OutputStep(step.sources, outputs, stream)


def made_pieces(step: Step, read: Read) -> Iterator[tuple[str, Pieces]]:
    """(name, pieces) of the tensors that a step makes: a stack some rows at a time, else whole."""
    if step.pieces:
        (name,) = step.outputs
        yield name, step.pieces(read)
        return
    made = step.run(read)
    for name in step.outputs:
        yield name, iter([made.pop(name)])


def _cast_all(name: str, pieces: Pieces, dtype: mx.Dtype) -> Pieces:
    for piece in pieces:
        yield cast(name, piece, dtype) if piece.dtype in FLOATS else piece


def _quantised(
    name: str, pieces: Pieces, dtype: mx.Dtype, packing: Quantization, spec: Spec
) -> Iterator[tuple[str, Pieces]]:
    """A weight's packed words, then its scales and biases, which are held until then."""
    first, *others = packing.outputs(name.removesuffix(".weight"), spec)
    kept: list[list[mx.array]] = [[] for _ in others]

    def words() -> Pieces:
        for piece in pieces:
            plain = piece.astype(dtype)
            packed, *rest = mx.quantize(plain, packing.group_size, packing.bits, mode=packing.mode)
            mx.eval(plain, packed, *rest)  # at once: the check then has nothing to wait for
            check_finite(name, piece, plain)
            for held, part in zip(kept, rest, strict=True):
                held.append(part)
            yield packed

    yield first, words()
    for other, held in zip(others, kept, strict=True):
        yield other, iter(held)


def is_finite(array: mx.array) -> bool:
    """Whether all values are finite, by their bits: many times faster than ``mx.isfinite``.

    Infinity and NaN have the largest magnitudes. As unsigned integers the negative ones are the
    largest of all, as signed integers the positive ones. numpy's maximum works in the array's own
    memory and is as fast as that memory.
    """
    signed, unsigned, infinity = {
        mx.float32: (np.int32, np.uint32, 0x7F800000),
        mx.float16: (np.int16, np.uint16, 0x7C00),
        mx.bfloat16: (np.int16, np.uint16, 0x7F80),
    }[array.dtype]
    top = 1 << (8 * array.dtype.size - 1)
    carrier = mx.uint32 if array.dtype.size == 4 else mx.uint16
    bits = np.array(array.view(carrier), copy=False)
    return not bits.size or bool(
        bits.view(signed).max() < infinity and bits.view(unsigned).max() < infinity + top
    )


def is_cast(name: str, spec: Spec) -> bool:
    """Whether a tensor is cast to the model's dtype; gate parameters and router bias are not."""
    return spec.dtype in FLOATS and not FLOAT32.search(name)


def cast(name: str, array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Cast an array; UserError where a value is not finite before or after."""
    result = array.astype(dtype)
    check_finite(name, array, result)
    return result


def check_finite(name: str, array: mx.array, result: mx.array) -> None:
    """Raise UserError where a cast array is not finite, saying whether it was before."""
    if is_finite(result):
        return
    if is_finite(array):
        kind = str(result.dtype).removeprefix("mlx.core.")
        raise UserError(f"{name} holds values beyond the range of {kind}: use bfloat16")
    raise UserError(f"{name} holds NaN or infinite values in the source")
