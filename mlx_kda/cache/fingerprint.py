"""What tells one model from another: a saved state is worth nothing under other weights."""

import hashlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

SAMPLE = 64  # numbers taken of each parameter


def fingerprint(model: nn.Module) -> str:
    """16 hex digits over the config, and each parameter's name, shape, dtype and some numbers.

    Another quantisation or dtype of the same weights is another model: its states differ.
    """
    digest = hashlib.sha256(repr(getattr(model, "args", None)).encode())
    parameters = sorted(tree_flatten(model.parameters()))
    samples = [_sample(array) for _, array in parameters]
    mx.eval(samples)
    for (name, array), sample in zip(parameters, samples, strict=True):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(str(sample.tolist()).encode())
    return digest.hexdigest()[:16]


def _sample(array: mx.array) -> Any:
    """Bits of some numbers spread over the array, whatever its dtype."""
    flat = array.reshape(-1)[:: max(1, array.size // SAMPLE)]
    carrier = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size]
    return mx.contiguous(flat).view(carrier)
