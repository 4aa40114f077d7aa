"""Ctrl-C and SIGTERM as wishes: a step is finished, what was asked to be saved is saved."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

# The terminal was closed, or somebody ends the process: both deserve a clean end.
ENDINGS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(Exception):
    """A wish to stop, noticed between two steps."""


class Stop:
    """The signal that asked to stop, None while nothing has."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def ends(self) -> bool:
        """Whether the program is to end, and not only what it is doing."""
        return self.signal in ENDINGS

    @property
    def status(self) -> int:
        """The exit status that says so, as shells have it."""
        return 128 + (self.signal or 0)

    def watch(self, progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """``progress``, that raises Stopped between two chunks once a signal came."""

        def update(done: int, total: int) -> None:
            progress(done, total)
            if self:
                raise Stopped

        return update


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Turn signals into a Stop, so that no step is left half done; a second one interrupts."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(signum: int, frame: Any) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.signal = signum

    with _handled({signal.SIGINT, *ENDINGS}, handle):
        yield stop


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Let SIGTERM and SIGHUP leave by SystemExit, so that what is to be done at the end is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, frame: Any) -> None:
        sys.exit(128 + signum)

    with _handled(set(ENDINGS), handle):
        yield


@contextlib.contextmanager
def _handled(signals: set[int], handle: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
