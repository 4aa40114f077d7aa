"""Checkpoints that came quantised: their weights seen as plain ones, or as MLX packs them.

compressed-tensors keeps, beside each other under one path:

    pack-quantized        weight_packed int32 [out, in*bits/32], unsigned (q + 2**(bits-1)), densely
                          from the lowest bit on; weight_scale [out, in/group] (or [out, 1]);
                          weight_shape [2]; weight_zero_point int32 [out*bits/32, in/group] packed
                          the same way along the rows; weight_g_idx [in], the group of each column
    mxfp4-pack-quantized  weight_packed uint8 [out, in/2], the lower half first; weight_scale uint8
                          [out, in/32], a power of two with bias 127

Symmetric integers in groups that MLX has, and mxfp4, are MLX's own layout but for the names: they
are taken over without another rounding (``w = scale * u - scale * 2**(bits-1)``, exactly).
"""

import re
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from .quantization import MODES
from .safetensors import Read, Spec

INTEGERS, MXFP4 = "pack-quantized", "mxfp4-pack-quantized"
PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


@dataclass(frozen=True)
class PackedWeight:
    """How one weight is packed: its shape, bits, weights a scale, and the parts that are there."""

    path: str
    shape: tuple[int, int]
    bits: int
    group_size: int
    format: str
    parts: frozenset[str]

    @property
    def is_ours(self) -> bool:
        """Whether MLX has the layout, so that nothing need be rounded again."""
        if self.format == MXFP4:
            return True
        _, _, groups, _ = MODES["affine"]
        plain = not self.parts & {"weight_zero_point", "weight_g_idx"}
        fits = self.shape[1] % 32 == 0 and self.bits in MODES["affine"][0]
        return plain and fits and self.group_size in groups

    def name(self, part: str) -> str:
        """The name of a part in the file."""
        return f"{self.path}.{part}"


def is_compressed(config: dict[str, Any]) -> bool:
    """Whether a config says that compressed-tensors wrote the weights."""
    entry = config.get("quantization_config")
    return isinstance(entry, dict) and entry.get("quant_method") == "compressed-tensors"


def layouts(config: dict[str, Any], tensors: dict[str, Spec]) -> list[PackedWeight]:
    """The packed weights of a compressed-tensors checkpoint.

    Raises CheckpointError naming a format or a shape that is not known.
    """
    entry = config["quantization_config"]
    sparsity = entry.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise CheckpointError(
            f"the source is sparse ({sparsity.get('format')}), which is not read; "
            "convert the unquantised checkpoint"
        )
    schemes = entry.get("config_groups")
    if not isinstance(schemes, dict) or not all(isinstance(s, dict) for s in schemes.values()):
        raise CheckpointError(
            "quantization_config in config.json says compressed-tensors but has no config_groups"
        )
    for scheme in schemes.values():
        kind = scheme.get("format") or entry.get("format")
        if kind not in (INTEGERS, MXFP4):
            raise CheckpointError(
                f"the source is quantised as {kind}, which is not read; supported of "
                f"compressed-tensors: {INTEGERS}, {MXFP4}"
            )
    suffix = ".weight_packed"
    paths = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    return [_layout(path, _scheme(path, schemes), entry, tensors) for path in paths]


def _scheme(path: str, schemes: dict[str, dict]) -> dict:
    """The scheme whose targets name a weight; a class name like Linear names them all."""

    def named(target: str) -> bool:
        if target.startswith("re:"):
            return re.match(target[3:], path) is not None
        return target == path or path.endswith(f".{target}")

    for scheme in schemes.values():
        if any(named(target) for target in scheme.get("targets") or []):
            return scheme
    for scheme in schemes.values():
        targets = scheme.get("targets") or ["Linear"]
        if any(target[:1].isupper() for target in targets):  # a class of modules
            return scheme
    raise CheckpointError(f"{path} is packed, and no config_group in config.json is for it")


def _layout(path: str, scheme: dict, entry: dict, tensors: dict[str, Spec]) -> PackedWeight:
    weights = scheme.get("weights") or {}
    packed, scale = tensors[f"{path}.weight_packed"], tensors.get(f"{path}.weight_scale")
    kind = scheme.get("format") or entry["format"]
    bits = weights.get("num_bits")
    parts = frozenset(part for part in PARTS if f"{path}.{part}" in tensors)
    asymmetric = weights.get("symmetric") is False
    if scale is None or len(packed.shape) != 2 or len(scale.shape) != 2:
        raise CheckpointError(f"{path} has no scales of its rows: this layout is not read")
    if kind == MXFP4:
        shape, group = (packed.shape[0], packed.shape[1] * 2), 32
        right = (bits, packed.dtype, scale.dtype) == (4, mx.uint8, mx.uint8)
    else:
        wanted = weights.get("group_size")
        width = scale.shape[1] * wanted if isinstance(wanted, int) and wanted > 0 else 0
        if not width and isinstance(bits, int) and bits > 0:  # one scale a row
            width = packed.shape[1] * 32 // bits
        shape, group = (packed.shape[0], width), width // scale.shape[1]
        right = (
            isinstance(bits, int)
            and 2 <= bits <= 8
            and packed.dtype == mx.int32
            and packed.shape[1] == -(-width * bits // 32)
            and asymmetric == ("weight_zero_point" in parts)
        )
    if not right or scale.shape != (shape[0], shape[1] // group):
        raise CheckpointError(
            f"{path} is packed in a layout that is not read: {kind}, {bits} bits, weight_packed "
            f"{list(packed.shape)}, weight_scale {list(scale.shape)}"
        )
    return PackedWeight(path, shape, bits, group, kind, parts)


def packed_part(layout: PackedWeight, part: str, read: Read) -> mx.array:
    """Weight, scales or biases as MLX packs them: bit for bit the same weights."""
    if part == "weight":
        return _checked(layout, read).view(mx.uint32)
    scales = read(layout.name("weight_scale"))
    if part == "scales":
        return scales
    # times a power of two: no rounding
    return scales * mx.array(-(2 ** (layout.bits - 1)), dtype=scales.dtype)


def as_plain(layout: PackedWeight, read: Read, dtype: mx.Dtype) -> mx.array:
    """The weight, dequantised as compressed-tensors does it: ``(q - zero point) * scale``."""
    packed = _checked(layout, read)
    if layout.format == MXFP4:
        scales = read(layout.name("weight_scale"))
        return mx.dequantize(packed.view(mx.uint32), scales, mode="mxfp4", dtype=dtype)
    rows, width = layout.shape
    q = unpack(packed, layout.bits, width)
    scales = read(layout.name("weight_scale"))
    zeros = mx.zeros(scales.shape, dtype=mx.int32)
    if "weight_zero_point" in layout.parts:
        words = read(layout.name("weight_zero_point"))
        zeros = unpack(words.T, layout.bits, rows).T
    if "weight_g_idx" in layout.parts:
        groups = read(layout.name("weight_g_idx"))
        scales, zeros = scales[:, groups], zeros[:, groups]
        return ((q - zeros).astype(scales.dtype) * scales).astype(dtype)
    q = q.reshape(rows, scales.shape[1], layout.group_size) - zeros[..., None]
    return (q.astype(scales.dtype) * scales[..., None]).reshape(rows, width).astype(dtype)


def unpack(words: mx.array, bits: int, count: int) -> mx.array:
    """Signed integers int32 [rows, count] from words [rows, count*bits/32] filled densely."""
    words = mx.contiguous(words).view(mx.uint32).astype(mx.uint64)
    words = mx.pad(words, [(0, 0), (0, 1)])
    first = mx.arange(count) * bits
    place, shift = first // 32, (first % 32).astype(mx.uint64)
    pairs = words[:, place] | (words[:, place + 1] << mx.array(32, dtype=mx.uint64))
    values = (pairs >> shift) & mx.array(2**bits - 1, dtype=mx.uint64)
    return values.astype(mx.int32) - 2 ** (bits - 1)


def _checked(layout: PackedWeight, read: Read) -> mx.array:
    """The packed words, once the shape that the file states is the one that was inferred."""
    if "weight_shape" in layout.parts:
        stated = tuple(read(layout.name("weight_shape")).tolist())
        if stated != layout.shape:
            raise CheckpointError(
                f"{layout.path} states the shape {list(stated)}, its packed words are for "
                f"{list(layout.shape)}"
            )
    return read(layout.name("weight_packed"))
