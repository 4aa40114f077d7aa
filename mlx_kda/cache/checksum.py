"""The checksum of a session's file, by which damage of any byte is noticed before it is used.

The last tensor of the file, ``crc32``, is four bytes, little-endian: the CRC-32 of the whole file
as it is with these four bytes 0.
"""

import zlib
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx

from ..errors import CheckpointError
from ..weights.safetensors import Spec, StoredTensor, as_array, read_bytes

NAME, BYTES = "crc32", 4
SPEC = Spec((BYTES,), mx.uint8)


class Crc32:
    """A CRC-32 that is fed piece by piece, as hashlib's digests are."""

    def __init__(self):
        self.value = 0

    def update(self, data: memoryview | bytes, /) -> None:
        self.value = zlib.crc32(data, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


def seal(path: Path, crc: Crc32) -> None:
    """Put the checksum of a file that was written with zeros there in its place."""
    with path.open("r+b") as file:
        file.seek(-BYTES, 2)
        file.write(crc.value.to_bytes(BYTES, "little"))


def read_arrays(
    file: BinaryIO, path: Path, stored: dict[str, StoredTensor], *, checked: bool
) -> dict[str, mx.array]:
    """Every tensor of an open file but the checksum; each byte is read once.

    Raises CheckpointError where ``checked`` and the checksum is missing or not that of the bytes.
    """
    order = sorted(stored, key=lambda name: stored[name].offset)
    crc, place, arrays = Crc32(), 0, {}
    if order:
        place = stored[order[0]].offset
        file.seek(0)
        crc.update(file.read(place))
    for name in order:
        if checked and stored[name].offset != place:
            raise CheckpointError(f"{path.name} is damaged: bytes between its tensors")
        data = read_bytes(stored[name], file)
        place += stored[name].nbytes
        if name == NAME:
            crc.update(bytes(BYTES))
            wanted = int.from_bytes(data.tobytes(), "little")
        else:
            crc.update(data)
            arrays[name] = as_array(stored[name], data)
    if checked and (not order or order[-1] != NAME or wanted != crc.value or file.read(1)):
        raise CheckpointError(
            f"{path.name} is damaged: its contents are not what was saved (the checksum differs); "
            "name another file, or begin anew"
        )
    return arrays
