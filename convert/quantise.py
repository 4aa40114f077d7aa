"""Casting and quantising what a mapping makes, with every value checked to be finite."""

import re

import mlx.core as mx
import numpy as np

from mlx_kda.errors import UserError

from .builder import FLOATS
from .recipe import Packing, Recipe
from .steps import Read, Step
from .tensor_files import Spec

FLOAT32 = re.compile(r"\.(A_log|dt_bias|e_score_correction_bias|global_scale)$")


def finish_step(step: Step, dtype: mx.Dtype, recipe: Recipe | None) -> Step:
    """The step with its outputs cast to the model's dtype and, by the recipe, quantised.

    Gate parameters and the router's bias stay float32. A cast to float16 that would overflow, and
    any value that is not finite, raises UserError with the tensor's name.
    """
    outputs: dict[str, Spec] = {}
    packings: dict[str, Packing] = {}
    targets: dict[str, mx.Dtype] = {}
    for name, spec in step.outputs.items():
        if is_cast(name, spec):
            spec = Spec(spec.shape, dtype)
        targets[name] = spec.dtype
        packing = recipe.choose(name, spec) if recipe else None
        if packing is None:
            outputs[name] = spec
        else:
            packings[name] = packing
            outputs |= packing.outputs(name.removesuffix(".weight"), spec)

    def run(read: Read) -> dict[str, mx.array]:
        made: dict[str, mx.array] = {}
        arrays = step.run(read)
        while arrays:
            name = next(iter(arrays))
            array = arrays.pop(name)
            if array.dtype in FLOATS:
                array = cast(name, array, targets[name])
            if (packing := packings.get(name)) is None:
                made[name] = array
                continue
            parts = mx.quantize(array, packing.group_size, packing.bits, mode=packing.mode)
            mx.eval(parts)
            path = name.removesuffix(".weight")
            made |= zip(packing.outputs(path, step.outputs[name]), parts, strict=True)
        return made

    return Step(step.sources, outputs, run)


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
    bits = np.array(mx.contiguous(array).view(carrier), copy=False)
    return not bits.size or bool(
        bits.view(signed).max() < infinity and bits.view(unsigned).max() < infinity + top
    )


def is_cast(name: str, spec: Spec) -> bool:
    """Whether a tensor follows the model's dtype; gate parameters and the bias do not."""
    return spec.dtype in FLOATS and not FLOAT32.search(name)


def cast(name: str, array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Cast, and refuse what is not finite before or after."""
    result = array.astype(dtype)
    if not is_finite(result):
        if is_finite(array):
            raise UserError(f"{name} holds values beyond the range of {dtype}; use bfloat16")
        raise UserError(f"{name} holds NaN or infinite values in the source")
    return result
