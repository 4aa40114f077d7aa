"""Checkpoints as compressed-tensors stores them, packed here with numpy, bit by bit."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .tiny_checkpoint import weights, write_checkpoint, write_weights

IGNORED = ("embed_tokens", "lm_head", "norm", "conv1d", "A_log", "dt_bias", ".gate.", "correction")


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned integers [rows, n] -> int32 words [rows, ceil(n*bits/32)], lowest bit first."""
    ones = (values[..., None] >> np.arange(bits)) & 1
    flat = ones.reshape(len(values), -1).astype(np.uint8)
    flat = np.pad(flat, [(0, 0), (0, -flat.shape[1] % 32)])
    return np.packbits(flat, axis=1, bitorder="little").view(np.int32)


def packed(
    weight: mx.array, bits: int, group: int | None, symmetric: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors that store a weight, and the weight they stand for, in float32."""
    rows, width = weight.shape
    groups = np.array(weight).reshape(rows, -1, group or width)
    low, high = groups.min(-1), groups.max(-1)
    top, half = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scale = np.maximum(np.abs(low), np.abs(high)) / (top / 2)
        zero = np.zeros(scale.shape, np.int64)
    else:
        scale = (np.maximum(high, 0) - np.minimum(low, 0)) / top
        zero = np.clip(np.round(-half - np.minimum(low, 0) / scale), -half, half - 1).astype(int)
    scale = scale.astype(np.float32)
    q = np.round(groups / scale[..., None]) + zero[..., None]
    q = np.clip(q, -half, half - 1).astype(np.int64)
    parts = {
        "weight_packed": pack(q.reshape(rows, width) + half, bits),
        "weight_scale": scale,
        "weight_shape": np.array([rows, width]),
    }
    if not symmetric:
        parts["weight_zero_point"] = pack((zero + half).T, bits).T.copy()
    plain = (q - zero[..., None]).astype(np.float32) * scale[..., None]
    return parts, plain.reshape(rows, width)


def mxfp4(weight: mx.array) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The same in mxfp4: MLX rounds, and the bytes are laid out as compressed-tensors has them."""
    words, scales = mx.quantize(weight, mode="mxfp4")
    parts = {"weight_packed": np.array(words).view(np.uint8), "weight_scale": np.array(scales)}
    plain = mx.dequantize(words, scales, mode="mxfp4", dtype=mx.float32)
    return parts, np.array(plain)


def write_compressed(
    folder: Path,
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = True,
    kind: str = "pack-quantized",
    only: str = "",
) -> dict[str, mx.array]:
    """Write the tiny checkpoint with its matrices quantised (those with ``only`` in their name).

    Returns the plain tensors that it stands for.
    """
    settings: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    settings |= {"strategy": "group" if group else "channel", "group_size": group}
    entry = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": settings}},
        "ignore": ["lm_head"],
    }
    write_checkpoint(folder, quantization_config=entry)
    stored, plain = {}, {}
    for name, tensor in weights().items():
        path, _, part = name.rpartition(".")
        if part != "weight" or only not in name or any(word in name for word in IGNORED):
            stored[name] = plain[name] = tensor
            continue
        is_mxfp4 = kind.startswith("mxfp4")
        parts, back = mxfp4(tensor) if is_mxfp4 else packed(tensor, bits, group, symmetric)
        stored |= {f"{path}.{p}": mx.array(a) for p, a in parts.items()}
        plain[name] = mx.array(back)
    write_weights(folder, stored)
    return plain


def settings_of(folder: Path) -> dict[str, Any]:
    """config.json of a folder."""
    return json.loads((folder / "config.json").read_text())
