"""MLX's quantised weights: modes, bits and group sizes, and the tensors that store them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, UserError
from .safetensors import Spec

# mode -> (bits allowed, default bits, group sizes allowed, default group size)
MODES: dict[str, tuple[tuple[int, ...], int, tuple[int, ...], int]] = {
    "affine": ((2, 3, 4, 5, 6, 8), 4, (32, 64, 128), 64),
    "mxfp4": ((4,), 4, (32,), 32),
    "mxfp8": ((8,), 8, (32,), 32),
    "nvfp4": ((4,), 4, (16,), 16),
}
PARTS = ("weight", "scales", "biases", "global_scale")  # of a quantised weight


@dataclass(frozen=True)
class Quantization:
    """How one weight is quantised, in the terms of mlx-lm's config."""

    bits: int
    group_size: int
    mode: str = "affine"

    @classmethod
    def make(
        cls, bits: int | None, group_size: int | None, mode: str, asked: str
    ) -> "Quantization":
        """A quantisation that MLX has, with the mode's defaults where a number is None.

        Raises UserError, beginning with ``asked``, where the mode does not have the numbers.
        """
        if mode not in MODES:
            raise UserError(f"{asked} {mode} is not known: choose from {', '.join(MODES)}")
        all_bits, default_bits, all_groups, default_group = MODES[mode]
        bits = default_bits if bits is None else bits
        group_size = default_group if group_size is None else group_size
        if bits not in all_bits:
            raise UserError(f"{asked} {mode} has no {bits} bits: choose {_one_of(all_bits)}")
        if group_size not in all_groups:
            raise UserError(
                f"{asked} {mode} has no group size {group_size}: choose {_one_of(all_groups)}"
            )
        return cls(bits, group_size, mode)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, with its share of 16-bit scales and biases (or 8-bit scales)."""
        return self.bits + (32 if self.mode == "affine" else 8) / self.group_size

    def fits(self, width: int) -> bool:
        """Whether rows of this width can be quantised."""
        return width % self.group_size == 0 and width * self.bits % 32 == 0

    def as_config(self) -> dict[str, Any]:
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


def config_entry(
    quantized: Mapping[str, Quantization], default: Quantization | None = None
) -> dict[str, Any]:
    """The ``quantization`` entry of config.json: a default, and the weights that differ from it.

    The default is by default the commonest.
    """
    if default is None:
        default = Counter(quantized.values()).most_common(1)[0][0]
    differ = {path: how.as_config() for path, how in quantized.items() if how != default}
    return default.as_config() | differ


def _one_of(values: tuple[int, ...]) -> str:
    return " or ".join(map(str, values))


def dequantize(arrays: Iterable[mx.array], settings: Quantization, dtype: mx.Dtype) -> mx.array:
    """The plain weight of a weight, its scales and, in affine mode, its biases."""
    weight, scales, *biases = arrays
    return mx.dequantize(
        weight, scales, biases[0] if biases else None, **settings.as_config(), dtype=dtype
    )


def quantization_of(tensors: Mapping[str, Spec], path: str, shape: tuple[int, ...]) -> Quantization:
    """How a weight is quantised, inferred from its tensors.

    ``shape`` is that of the plain weight. Raises CheckpointError where the shapes fit no mode.
    """
    width = shape[-1]
    weight = tensors.get(f"{path}.weight")
    scales = tensors[f"{path}.scales"]
    affine = f"{path}.biases" in tensors
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
        and (not affine or tensors[f"{path}.biases"].shape == scales.shape)
        and (affine or scales.dtype == mx.uint8)
    )
    if mode is None or not fits:
        raise CheckpointError(
            f"{path} is quantised in a format that MLX does not have: weight {list(weight.shape)}, "
            f"scales {list(scales.shape)} for a matrix of {list(shape)}"
        )
    return Quantization(bits, group_size, mode)
