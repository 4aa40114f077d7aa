"""Writing a safetensors file in a stream, larger than one wants to hold in memory."""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

from .background import WAITING_BYTES, Background
from .tensor_files import DTYPE_NAMES, Spec

BLOCK = 16_000_000
SYNC_BYTES = (
    256_000_000  # what is flushed to the disk at a time, so that the end is not a long wait
)


def write_file(
    path: Path,
    tensors: dict[str, Spec],
    arrays: Iterable[tuple[str, mx.array]],
    metadata: dict[str, str] | None = None,
    waiting: int = WAITING_BYTES,
) -> str:
    """Write a file: the header from `tensors`, then each array as it comes, and sync it.

    `arrays` yields every tensor of `tensors`, in that order. Writing and hashing run in threads of
    their own, at most `waiting` bytes (or one tensor) behind. `metadata` is the file's own, texts
    by name. Returns the SHA-256 of the file. The caller gives a temporary name and renames.
    """
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        unsynced = 0

        def write(block: memoryview) -> None:
            nonlocal unsynced
            while block:
                count = file.write(block[:BLOCK])
                block = block[count:]
                unsynced += count
                if unsynced >= SYNC_BYTES:
                    os.fsync(file.fileno())
                    unsynced = 0

        with Background(write, waiting) as writer, Background(digest.update, waiting) as hasher:
            for block in _blocks(tensors, arrays, metadata or {"format": "mlx"}):
                hasher.add(block)
                writer.add(block)
                del block
        os.fsync(file.fileno())
    return digest.hexdigest()


def _blocks(
    tensors: dict[str, Spec], arrays: Iterable[tuple[str, mx.array]], metadata: dict[str, str]
) -> Iterator[memoryview]:
    """The bytes of a file, block by block."""
    header, offset = {"__metadata__": metadata}, 0
    for name, spec in tensors.items():
        header[name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(struct.pack("<Q", len(text)) + text)
    expected = iter(tensors.items())
    for name, array in arrays:
        wanted, spec = next(expected)
        if (name, array.shape, array.dtype) != (wanted, spec.shape, spec.dtype):
            raise RuntimeError(f"planned {wanted} {spec}, got {name} {array.shape} {array.dtype}")
        yield array_bytes(array)
    if left := [name for name, _ in expected]:
        raise RuntimeError(f"planned but not written: {left}")


def array_bytes(array: mx.array) -> memoryview:
    """The bytes of an array, row-major, without another copy where it is already contiguous."""
    carrier = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size]
    bits = mx.contiguous(array).view(carrier)
    mx.eval(bits)
    return memoryview(np.array(bits, copy=False)).cast("B")
