"""Casting and quantising what a mapping makes, with every value checked to be finite."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..errors import UserError
from ..weights.quantization import Quantization
from ..weights.safetensors import FLOATS, Pieces, Read, Spec
from ..weights.weight_mapping import Step
from .recipe import Recipe

FLOAT32 = re.compile(r"\.(A_log|dt_bias|e_score_correction_bias|global_scale)$")


@dataclass(frozen=True)
class Finished(Step):
    """A step under a recipe; `stream` makes the same tensors as `run`, in pieces.

    The pieces of one tensor must be taken before the next tensor is asked for.
    """

    stream: Callable[[Read], Iterator[tuple[str, Pieces]]] = field(kw_only=True)


def finish_step(step: Step, dtype: mx.Dtype, recipe: Recipe | None) -> Finished:
    """The step with its outputs cast to the model's dtype and, by the recipe, quantised.

    Gate parameters and the router's bias stay float32. A cast to float16 that would overflow, and
    any value that is not finite, raises UserError with the tensor's name.
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
        if step.pieces:
            (name,) = step.outputs
            parts: dict[str, Pieces] = {name: step.pieces(read)}
        else:
            made = step.run(read)
            parts = {name: _once(made, name) for name in step.outputs}
        for name, pieces in parts.items():
            if (packing := packings[name]) is None:
                yield name, _cast_all(name, pieces, targets[name])
            else:
                yield from _packed(name, pieces, targets[name], packing, step.outputs[name])

    def run(read: Read) -> dict[str, mx.array]:
        made = {name: list(pieces) for name, pieces in stream(read)}
        return {n: p[0] if len(p) == 1 else mx.concatenate(p) for n, p in made.items()}

    return Finished(step.sources, outputs, run, stream=stream)


def _once(made: dict[str, mx.array], name: str) -> Pieces:
    """A tensor as its only piece, which nothing else keeps."""
    yield made.pop(name)


def _cast_all(name: str, pieces: Pieces, dtype: mx.Dtype) -> Pieces:
    for piece in pieces:
        yield cast(name, piece, dtype) if piece.dtype in FLOATS else piece


def _packed(
    name: str, pieces: Pieces, dtype: mx.Dtype, packing: Quantization, spec: Spec
) -> Iterator[tuple[str, Pieces]]:
    """The words of a weight, then its scales and biases, which are kept meanwhile."""
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
    """Whether all values are finite, read off the bits: many times faster than `mx.isfinite`.

    Infinity and NaN have the largest magnitudes. As unsigned integers the negative ones are the
    largest of all; as signed integers the positive ones are. numpy looks, in the array's own
    memory: its vectorised maximum is as fast as that memory.
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
    """Whether a tensor follows the model's dtype; gate parameters and the bias do not."""
    return spec.dtype in FLOATS and not FLOAT32.search(name)


def cast(name: str, array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Cast, and refuse what is not finite before or after."""
    result = array.astype(dtype)
    check_finite(name, array, result)
    return result


def check_finite(name: str, array: mx.array, result: mx.array) -> None:
    """Refuse what is not finite once it is cast, saying whether it was before."""
    if is_finite(result):
        return
    if is_finite(array):
        kind = str(result.dtype).removeprefix("mlx.core.")
        raise UserError(f"{name} holds values beyond the range of {kind}: use bfloat16")
    raise UserError(f"{name} holds NaN or infinite values in the source")
