"""Writing safetensors files as a stream, so that they may be larger than memory.

Writing, syncing and hashing release Python's lock, so they run in threads while MLX computes.
"""

import contextlib
import hashlib
import json
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import UserError
from ..format import size as size_of
from .safetensors import DTYPE_NAMES, MAX_HEADER_BYTES, Pieces, Spec

WAITING_BYTES = 64_000_000
SYNC_BYTES = 64_000_000  # so that the sync at the end is short
BLOCK = 16_000_000


def write_file(
    path: Path,
    tensors: dict[str, Spec],
    arrays: Iterable[tuple[str, mx.array | Pieces]],
    metadata: dict[str, str] | None = None,
    waiting: int = WAITING_BYTES,
) -> str:
    """Write a file: the header from ``tensors``, then each array as it comes.

    Args:
        path: a temporary name; the caller syncs and renames.
        tensors: the spec of every tensor, in order.
        arrays: yields the same names in the same order, each with a whole array or with pieces
            cut along its first axis longer than 1.
        metadata: the file's own, strings by name.
        waiting: how many bytes (or one piece) writing and hashing may be behind.

    Returns the SHA-256 of the file's bytes in hexadecimal.
    """
    digest = hashlib.sha256()
    unsynced = 0

    def write(block: memoryview) -> None:
        nonlocal unsynced
        while block:
            count = file.write(block[:BLOCK])
            block, unsynced = block[count:], unsynced + count
            if unsynced >= SYNC_BYTES:
                unsynced = 0
                syncing.add(memoryview(b""))

    def sync(_: memoryview) -> None:
        # The caller's sync meets the same error and raises it.
        with contextlib.suppress(OSError):
            os.fsync(file.fileno())

    with (
        path.open("wb", buffering=0) as file,
        Background(sync) as syncing,
        Background(write, waiting) as writer,
        Background(digest.update, waiting) as hasher,
    ):
        for block in _blocks(tensors, arrays, metadata or {"format": "mlx"}):
            hasher.add(block)
            writer.add(block)
            del block
    return digest.hexdigest()


def _blocks(
    tensors: dict[str, Spec],
    arrays: Iterable[tuple[str, mx.array | Pieces]],
    metadata: dict[str, str],
) -> Iterator[memoryview]:
    """The bytes of a file, block by block."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, spec in tensors.items():
        header[name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UserError(
            f"the header of a safetensors file would take {size_of(len(text))}, which is too much"
        )
    yield memoryview(struct.pack("<Q", len(text)) + text)
    expected = iter(tensors.items())
    for name, array in arrays:
        wanted, spec = next(expected)
        size = 0
        for piece in (array,) if isinstance(array, mx.array) else array:
            fits = name == wanted and piece.dtype == spec.dtype and _is_cut(piece.shape, spec.shape)
            if not fits:
                raise RuntimeError(f"planned {wanted} {spec}, got {name} {piece.shape}")
            size += piece.size
            yield array_bytes(piece)
        if size != spec.size:
            raise RuntimeError(f"planned {wanted} {spec}, got {size} values of {name}")
    if left := [name for name, _ in expected]:
        raise RuntimeError(f"planned but not written: {left}")


def _is_cut(piece: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether arrays of two shapes differ in the first axis longer than 1 at most."""
    axis = next((i for i, n in enumerate(whole) if n != 1), 0)
    return piece[:axis] == whole[:axis] and piece[axis + 1 :] == whole[axis + 1 :]


def array_bytes(array: mx.array) -> memoryview:
    """The bytes of an array, row-major, without another copy where it is already contiguous."""
    carrier = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size]
    bits = mx.contiguous(array).view(carrier)
    mx.eval(bits)
    return np.array(bits, copy=False).data.cast("B")


class Background:
    """Runs ``work`` on blocks in a thread, in order; at most ``limit`` bytes (or one block) wait.

    Leaving the ``with`` block waits for the rest. What the thread raises is raised again by the
    next ``add`` or at the end.
    """

    def __init__(self, work: Callable[[memoryview], object], limit: int = WAITING_BYTES):
        self._work, self._limit = work, limit
        self._blocks: deque[memoryview] = deque()
        self._bytes, self._closed = 0, False
        self._error: BaseException | None = None
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def add(self, block: memoryview) -> None:
        """Queue a block; blocks while too many bytes are queued."""
        with self._change:
            while self._bytes and self._bytes + len(block) > self._limit and not self._error:
                self._change.wait()
            if self._error:
                raise self._error
            self._blocks.append(block)
            self._bytes += len(block)
            self._change.notify_all()

    def __enter__(self) -> "Background":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._change:
            self._closed = True
            if kind is not None:
                self._blocks.clear()
            self._change.notify_all()
        self._thread.join()
        if kind is None and self._error:
            raise self._error

    def _run(self) -> None:
        try:
            while True:
                with self._change:
                    while not self._blocks and not self._closed:
                        self._change.wait()
                    if not self._blocks:
                        return
                    block = self._blocks[0]
                self._work(block)
                with self._change:
                    if self._blocks:
                        self._blocks.popleft()
                    self._bytes -= len(block)
                    del block
                    self._change.notify_all()
        except BaseException as error:
            with self._change:
                self._error = error
                self._change.notify_all()
