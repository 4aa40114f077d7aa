"""Work on blocks in a thread beside the one that computes.

Reading, writing and hashing let go of Python's lock, so they run while MLX computes.
"""

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

WAITING_BYTES = 64_000_000


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
