"""Which weights are stored in few bits, and how: the recipe of a conversion.

Default recipe: every matrix is quantised but those that steer the gates and the convolutions.
They are about 1 % of the bytes and do most of the damage, because their errors are multiplied
along the sequence. The router has 8 affine bits, or more of them.
"""

import re
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_kda.errors import UserError

from .builder import FLOATS
from .steps import Read, Step
from .tensor_files import Spec

# mode -> (bits allowed, default bits, group sizes allowed, default group size)
MODES = {
    "affine": ((2, 3, 4, 5, 6, 8), 4, (32, 64, 128), 64),
    "mxfp4": ((4,), 4, (32,), 32),
    "mxfp8": ((8,), 8, (32,), 32),
    "nvfp4": ((4,), 4, (16,), 16),
}
GATE_PATH = re.compile(r"\.self_attn\.(b_proj|f_a_proj|f_b_proj|g_a_proj|g_b_proj)$")
ROUTER = re.compile(r"\.mlp\.gate$")
FLOAT32 = re.compile(r"\.(A_log|dt_bias|e_score_correction_bias|global_scale)$")


@dataclass(frozen=True)
class Packing:
    """How one weight is quantised, in the words of mlx-lm's config."""

    bits: int
    group_size: int
    mode: str = "affine"

    def as_config(self) -> dict:
        """The entry of config.json."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def outputs(self, path: str, spec: Spec) -> dict[str, Spec]:
        """The tensors that a plain weight of this spec becomes."""
        *rows, width = spec.shape
        scales = Spec((*rows, width // self.group_size), spec.dtype)
        packed = {f"{path}.weight": Spec((*rows, width * self.bits // 32), mx.uint32)}
        if self.mode == "affine":
            return packed | {f"{path}.scales": scales, f"{path}.biases": scales}
        return packed | {f"{path}.scales": Spec(scales.shape, mx.uint8)}


ROUTER_PACKING = Packing(8, 64)


@dataclass
class Recipe:
    """Chooses a packing for each weight and remembers what it kept, and why."""

    default: Packing
    kept: dict[str, str] = field(default_factory=dict)
    packed: dict[str, Packing] = field(default_factory=dict)

    @classmethod
    def make(cls, bits: int | None, group_size: int | None, mode: str) -> "Recipe | None":
        """The recipe for `--q-bits`, `--q-group-size` and `--q-mode`; None if none was asked for.

        Raises UserError where the mode does not have the bits or the group size.
        """
        if mode not in MODES:
            raise UserError(f"--q-mode {mode} is not known; choose from {', '.join(MODES)}")
        if bits is None and group_size is None and mode == "affine":
            return None
        all_bits, default_bits, all_groups, default_group = MODES[mode]
        bits = default_bits if bits is None else bits
        group_size = default_group if group_size is None else group_size
        if bits not in all_bits:
            raise UserError(f"--q-mode {mode} has no {bits} bits; choose {_one_of(all_bits)}")
        if group_size not in all_groups:
            raise UserError(
                f"--q-mode {mode} has no group size {group_size}; choose {_one_of(all_groups)}"
            )
        return cls(Packing(bits, group_size, mode))

    def choose(self, name: str, spec: Spec) -> Packing | None:
        """The packing for one tensor, or None if it stays as it is."""
        path, _, part = name.rpartition(".")
        if part != "weight" or len(spec.shape) < 2 or spec.dtype not in FLOATS:
            return None
        packing = self.default
        if path.endswith("_conv.conv"):
            return self._keep(path, "convolution window")
        if GATE_PATH.search(path):
            return self._keep(path, "gate path")
        if ROUTER.search(path) and (packing.bits < 8 or packing.mode != "affine"):
            packing = ROUTER_PACKING
        width = spec.shape[-1]
        if width % packing.group_size or width * packing.bits % 32:
            return self._keep(path, f"width {width} is no multiple of group {packing.group_size}")
        self.packed[path] = packing
        return packing

    def _keep(self, path: str, reason: str) -> None:
        self.kept[path] = reason

    def as_config(self) -> dict:
        """The `quantization` entry of config.json: a default and the weights that differ."""
        differ = {p: v.as_config() for p, v in self.packed.items() if v != self.default}
        return self.default.as_config() | differ


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
        for name, array in step.run(read).items():
            if array.dtype in FLOATS:
                array = cast(name, array, targets[name])
            if (packing := packings.get(name)) is None:
                made[name] = array
                continue
            parts = mx.quantize(array, packing.group_size, packing.bits, mode=packing.mode)
            path = name.removesuffix(".weight")
            made |= zip(packing.outputs(path, step.outputs[name]), parts, strict=True)
        return made

    return Step(step.sources, outputs, run)


def is_finite(array: mx.array) -> bool:
    """Whether all values are finite, read off the bits: many times faster than `mx.isfinite`.

    Infinity and NaN have the largest magnitudes. As unsigned integers the negative ones are the
    largest of all; as signed integers the positive ones are.
    """
    signed, unsigned, infinity = {
        mx.float32: (mx.int32, mx.uint32, 0x7F800000),
        mx.float16: (mx.int16, mx.uint16, 0x7C00),
        mx.bfloat16: (mx.int16, mx.uint16, 0x7F80),
    }[array.dtype]
    top = 1 << (8 * array.dtype.size - 1)
    positive, negative = mx.max(array.view(signed)), mx.max(array.view(unsigned))
    mx.eval(positive, negative)
    return positive.item() < infinity and negative.item() < infinity + top


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


def _one_of(values: tuple[int, ...]) -> str:
    return " or ".join(map(str, values))
