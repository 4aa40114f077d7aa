"""How MLX stores a quantised weight: the modes, bits and group sizes, and the tensors they make."""

from dataclasses import dataclass

import mlx.core as mx

from ..errors import UserError
from .tensor_files import Spec

# mode -> (bits allowed, default bits, group sizes allowed, default group size)
MODES = {
    "affine": ((2, 3, 4, 5, 6, 8), 4, (32, 64, 128), 64),
    "mxfp4": ((4,), 4, (32,), 32),
    "mxfp8": ((8,), 8, (32,), 32),
    "nvfp4": ((4,), 4, (16,), 16),
}


@dataclass(frozen=True)
class Packing:
    """How one weight is quantised, in the words of mlx-lm's config."""

    bits: int
    group_size: int
    mode: str = "affine"

    @classmethod
    def make(cls, bits: int | None, group_size: int | None, mode: str, asked: str) -> "Packing":
        """A packing that MLX has, the mode's own numbers where none are given.

        Raises UserError, naming what was `asked` for, where the mode does not have them.
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
        """Stored bits a weight, with its share of scales and biases of 16 bits (or scales of 8)."""
        return self.bits + (32 if self.mode == "affine" else 8) / self.group_size

    def fits(self, width: int) -> bool:
        """Whether rows of this width can be packed."""
        return width % self.group_size == 0 and width * self.bits % 32 == 0

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


def _one_of(values: tuple[int, ...]) -> str:
    return " or ".join(map(str, values))
