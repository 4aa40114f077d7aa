"""Reading safetensors files: their headers, and one tensor's bytes at a time.

``mx.load`` reads whole files and does not say which one is truncated.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError

# safetensors name -> (MLX dtype, numpy dtype of the same width that carries the bits)
DTYPES: dict[str, tuple[mx.Dtype, type]] = {
    "F32": (mx.float32, np.uint32),
    "F16": (mx.float16, np.uint16),
    "BF16": (mx.bfloat16, np.uint16),
    "F64": (mx.float64, np.uint64),
    "U8": (mx.uint8, np.uint8),
    "U16": (mx.uint16, np.uint16),
    "U32": (mx.uint32, np.uint32),
    "U64": (mx.uint64, np.uint64),
    "I8": (mx.int8, np.uint8),
    "I16": (mx.int16, np.uint16),
    "I32": (mx.int32, np.uint32),
    "I64": (mx.int64, np.uint64),
    "BOOL": (mx.bool_, np.uint8),
}
# in config.json and on the command line
DTYPE_WORDS = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "fp32": mx.float32,
    "fp16": mx.float16,
    "bf16": mx.bfloat16,
}
DTYPE_NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}
FLOATS = (mx.float32, mx.float16, mx.bfloat16)  # that weights are computed in
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
Read = Callable[[str], mx.array]  # a tensor by its name
Pieces = Iterator[mx.array]  # a tensor, some rows at a time
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor, known before its data is read."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.size * self.dtype.size


@dataclass(frozen=True)
class StoredTensor(Spec):
    """A tensor inside a safetensors file: its spec, the file, and the offset of its first byte."""

    file: Path
    offset: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name; no tensor data is read.

    Raises CheckpointError where the file is not safetensors, is truncated, or holds a dtype that
    MLX does not have (float8).
    """
    try:
        with path.open("rb", buffering=0) as source:
            size = os.fstat(source.fileno()).st_size
            head = source.read(8)
            if len(head) < 8:
                raise CheckpointError(f"{path.name} is truncated: {size} bytes; download it again")
            (length,) = struct.unpack("<Q", head)
            if length > MAX_HEADER_BYTES or 8 + length > size:
                raise CheckpointError(
                    f"{path.name} is truncated or not a safetensors file: a header of {length} "
                    f"bytes in a file of {size}; download it again"
                )
            header = json.loads(source.read(length))
            if not isinstance(header, dict):
                raise ValueError("the header is not a JSON object")
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} has a damaged safetensors header: {error}") from error
    header.pop("__metadata__", None)
    return {
        name: stored_entry(path, name, entry, start=8 + length, size=size)
        for name, entry in header.items()
    }


def stored_entry(
    path: Path, name: str, entry: dict[str, Any], start: int, size: int | None = None
) -> StoredTensor:
    """A tensor by its entry in a header; ``size`` is the file's, None if it is not there yet."""
    try:
        kind, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path.name} has a damaged entry for {name}") from error
    if kind not in DTYPES:
        raise CheckpointError(
            f"{name} in {path.name} is stored as {kind}, which MLX cannot hold; "
            f"supported: {', '.join(DTYPES)}"
        )
    stored = StoredTensor(shape, DTYPES[kind][0], path, start + begin)
    if begin < 0 or end - begin != stored.nbytes or any(n < 0 for n in shape):
        raise CheckpointError(f"{path.name} has a damaged entry for {name}")
    if size is not None and start + end > size:
        raise CheckpointError(
            f"{path.name} is truncated: {name} ends at byte {start + end} of {size}; "
            "download it again"
        )
    return stored


def rows_of(stored: StoredTensor, start: int, stop: int) -> StoredTensor:
    """Rows of a stored tensor, as a tensor in the same file."""
    row = stored.nbytes // stored.shape[0]
    shape = (stop - start, *stored.shape[1:])
    return replace(stored, shape=shape, offset=stored.offset + start * row)


def in_pieces(stored: StoredTensor, nbytes: int) -> Iterator[StoredTensor]:
    """A stored tensor's rows, in pieces of at most ``nbytes`` bytes (or of one row)."""
    if stored.nbytes <= nbytes:
        yield stored
        return
    at_a_time = max(1, nbytes * stored.shape[0] // stored.nbytes)
    for start in range(0, stored.shape[0], at_a_time):
        yield rows_of(stored, start, min(start + at_a_time, stored.shape[0]))


def read_tensor(stored: StoredTensor) -> mx.array:
    """Read one tensor, bits unchanged; CheckpointError if the file ends too soon."""
    return as_array(stored, read_bytes(stored))


def read_bytes(stored: StoredTensor) -> Bytes:
    """The bytes of one tensor. Raises CheckpointError if the file ends too soon."""
    data = np.empty(stored.nbytes, np.uint8)
    try:
        with stored.file.open("rb", buffering=0) as source:
            source.seek(stored.offset)
            done = 0
            while done < stored.nbytes:
                count = source.readinto(data[done:].data)
                if not count:
                    raise CheckpointError(f"{stored.file.name} is truncated: download it again")
                done += count
    except OSError as error:
        raise CheckpointError(f"{stored.file.name} cannot be read: {error.strerror}") from error
    return data


def as_array(spec: Spec, data: Bytes) -> mx.array:
    """The array of this shape and dtype that has these bytes."""
    carrier = DTYPES[DTYPE_NAMES[spec.dtype]][1]
    bits = mx.array(data.view(carrier).reshape(spec.shape))
    return bits.view(spec.dtype) if bits.dtype != spec.dtype else bits
