"""Weights quantised by compressed-tensors, as plain weights or in MLX's own format.

Under one path a checkpoint holds:

    pack-quantized        weight_packed int32 [out, in*bits/32], unsigned (q + 2**(bits-1)), densely
                          from the lowest bit on; weight_scale [out, in/group] (or [out, 1]);
                          weight_shape [2]; weight_zero_point int32 [out*bits/32, in/group] packed
                          the same way along the rows; weight_g_idx [in], the group of each column
    mxfp4-pack-quantized  weight_packed uint8 [out, in/2], the lower half first; weight_scale uint8
                          [out, in/32], a power of two with bias 127

Symmetric integers in groups that MLX has, and mxfp4, are MLX's own format under other names: they
are taken over without another rounding (``w = scale * u - scale * 2**(bits-1)``, exactly).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .quantization import MODES
from .safetensors import Read, Spec

INTEGERS, MXFP4 = "pack-quantized", "mxfp4-pack-quantized"
PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


@dataclass(frozen=True)
class PackedWeight:
    """How one weight is stored: its shape, bits, weights per scale, and which parts there are."""

    path: str
    shape: tuple[int, int]
    bits: int
    group_size: int
    format: str
    parts: frozenset[str]

    @property
    def is_mlx(self) -> bool:
        """Whether MLX has the format, so that nothing is rounded again."""
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


def packed_weights(config: dict[str, Any], tensors: Mapping[str, Spec]) -> list[PackedWeight]:
    """The packed weights of a compressed-tensors checkpoint.

    Raises CheckpointError naming a format or a shape that is not supported.
    """
    entry = config["quantization_config"]
    sparsity = entry.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise CheckpointError(
            f"the source is sparse ({sparsity.get('format')}), which is not supported; "
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
                f"the source is quantised as {kind}, which is not supported; supported of "
                f"compressed-tensors: {INTEGERS}, {MXFP4}"
            )
    suffix = ".weight_packed"
    paths = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    return [_packed_weight(path, _scheme(path, schemes), entry, tensors) for path in paths]


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
    raise CheckpointError(f"{path} is quantised, but no config_group in config.json targets it")


def _packed_weight(
    path: str, scheme: dict[str, Any], entry: dict[str, Any], tensors: Mapping[str, Spec]
) -> PackedWeight:
    weights = scheme.get("weights") or {}
    packed, scale = tensors[f"{path}.weight_packed"], tensors.get(f"{path}.weight_scale")
    kind = scheme.get("format") or entry["format"]
    bits = weights.get("num_bits")
    bits = bits if isinstance(bits, int) else 0
    parts = frozenset(part for part in PARTS if f"{path}.{part}" in tensors)
    asymmetric = weights.get("symmetric") is False
    if scale is None or len(packed.shape) != 2 or len(scale.shape) != 2:
        raise CheckpointError(f"{path} has no scale per row or group, which is not supported")
    if kind == MXFP4:
        shape, group = (packed.shape[0], packed.shape[1] * 2), 32
        right = (bits, packed.dtype, scale.dtype) == (4, mx.uint8, mx.uint8)
    else:
        wanted = weights.get("group_size")
        width = scale.shape[1] * wanted if isinstance(wanted, int) and wanted > 0 else 0
        if not width and bits > 0:  # one scale per row
            width = packed.shape[1] * 32 // bits
        shape, group = (packed.shape[0], width), width // scale.shape[1]
        right = (
            2 <= bits <= 8
            and packed.dtype == mx.int32
            and packed.shape[1] == -(-width * bits // 32)
            and asymmetric == ("weight_zero_point" in parts)
        )
    if not right or scale.shape != (shape[0], shape[1] // group):
        raise CheckpointError(
            f"{path} is quantised in a layout that is not supported: {kind}, "
            f"{weights.get('num_bits')} bits, weight_packed {list(packed.shape)}, weight_scale "
            f"{list(scale.shape)}"
        )
    return PackedWeight(path, shape, bits, group, kind, parts)


def mlx_part(packed: PackedWeight, part: str, read: Read) -> mx.array:
    """Weight, scales or biases in MLX's format: exactly the same weights."""
    if part == "weight":
        return _checked_words(packed, read).view(mx.uint32)
    scales = read(packed.name("weight_scale"))
    if part == "scales":
        return scales
    # times a power of two: no rounding
    return scales * mx.array(-(2 ** (packed.bits - 1)), dtype=scales.dtype)


def dequantize(packed: PackedWeight, read: Read, dtype: mx.Dtype) -> mx.array:
    """The plain weight, ``(q - zero point) * scale``, as compressed-tensors dequantises it."""
    words = _checked_words(packed, read)
    if packed.format == MXFP4:
        scales = read(packed.name("weight_scale"))
        return mx.dequantize(words.view(mx.uint32), scales, mode="mxfp4", dtype=dtype)
    rows, width = packed.shape
    q = unpack(words, packed.bits, width)
    scales = read(packed.name("weight_scale"))
    zeros = mx.zeros(scales.shape, dtype=mx.int32)
    if "weight_zero_point" in packed.parts:
        zero_words = read(packed.name("weight_zero_point"))
        zeros = unpack(zero_words.T, packed.bits, rows).T
    if "weight_g_idx" in packed.parts:
        groups = read(packed.name("weight_g_idx"))
        scales, zeros = scales[:, groups], zeros[:, groups]
        return ((q - zeros).astype(scales.dtype) * scales).astype(dtype)
    q = q.reshape(rows, scales.shape[1], packed.group_size) - zeros[..., None]
    return (q.astype(scales.dtype) * scales[..., None]).reshape(rows, width).astype(dtype)


def unpack(words: mx.array, bits: int, count: int) -> mx.array:
    """Signed integers int32 [rows, count] from densely packed words [rows, count*bits/32]."""
    words = mx.contiguous(words).view(mx.uint32).astype(mx.uint64)
    words = mx.pad(words, [(0, 0), (0, 1)])
    first = mx.arange(count) * bits
    place, shift = first // 32, (first % 32).astype(mx.uint64)
    pairs = words[:, place] | (words[:, place + 1] << mx.array(32, dtype=mx.uint64))
    values = (pairs >> shift) & mx.array(2**bits - 1, dtype=mx.uint64)
    return values.astype(mx.int32) - 2 ** (bits - 1)


def _checked_words(packed: PackedWeight, read: Read) -> mx.array:
    """``weight_packed``; CheckpointError where ``weight_shape`` is not the shape inferred."""
    if "weight_shape" in packed.parts:
        shape = np.array(read(packed.name("weight_shape"))).tolist()
        if shape != list(packed.shape):
            raise CheckpointError(
                f"{packed.path}: weight_shape is {shape}, but weight_packed is for "
                f"{list(packed.shape)}"
            )
    return read(packed.name("weight_packed"))
