"""Work in threads beside the one that computes.

Reading, writing and hashing let go of Python's lock, so they run while MLX computes.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

WAITING_BYTES = 64_000_000
FLUSH_BYTES = 64_000_000


class Background:
    """Runs ``work`` on blocks in a thread, in order; at most ``limit`` bytes wait (or one block).

    Leaving the ``with`` block waits for the rest. What the thread raises is raised again by the
    next ``add`` or at the end.
    """

    def __init__(self, work: Callable[[memoryview], object], limit: int = WAITING_BYTES):
        self._work, self._limit = work, limit
        self._blocks: deque = deque()
        self._bytes, self._closed = 0, False
        self._error: BaseException | None = None
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def add(self, block: memoryview) -> None:
        """Hand a block over; waits while too much is waiting already."""
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


class Flusher:
    """Syncs a file to the disk in a thread while it is written, so that the end is no long wait."""

    def __init__(self, file: int, every: int = FLUSH_BYTES):
        self._file, self._every, self._unsynced = file, every, 0
        self._due, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def wrote(self, count: int) -> None:
        """Count bytes that were written; never waits."""
        self._unsynced += count
        if self._unsynced >= self._every:
            self._unsynced = 0
            self._due.set()

    def __enter__(self) -> "Flusher":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        self._due.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            if self._closed:
                return
            # What a disk has to say of it, the sync at the end will hear.
            with contextlib.suppress(OSError):
                os.fsync(self._file)
