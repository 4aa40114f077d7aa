"""Ctrl-C and SIGTERM: the current step is finished and the session saved before a command stops.

Python runs signal handlers between two bytecodes, and a call to MLX can take as long as a whole
step. A thread therefore receives the signals as they arrive: it tells the user that the step is
being finished, and exits the program on a second Ctrl-C. Files are written under a temporary name
first, so what was saved before stays intact.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..files import remove_temporary_files
from .output import has_cursor

# The terminal was closed, or the process is to end.
ENDINGS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
PATIENCE = 0.3  # seconds in which more signals belong to the first one, as from a key held down
WAITING = "(finishing this step; press Ctrl-C again to quit at once, without saving)"
SHOW_CURSOR = "\033[?25h"  # a progress bar hides it


class Stopped(Exception):
    """Raised between two chunks of a prompt after a signal."""


class Stop:
    """The signal that asked to stop; false until one arrives."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def ends(self) -> bool:
        """Whether the program must exit, not only stop the current answer."""
        return self.signal in ENDINGS

    @property
    def status(self) -> int:
        """The exit status for the signal, as in a shell."""
        return 128 + (self.signal or 0)

    def watch(self, progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """``progress`` that raises Stopped after a signal."""

        def update(done: int, total: int) -> None:
            progress(done, total)
            if self:
                raise Stopped

        return update


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Record signals in a Stop instead of raising; a second Ctrl-C exits at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(signum: int, frame: Any) -> None:
        if not stop or signum in ENDINGS:
            stop.signal = signum

    with _handled({signal.SIGINT, *ENDINGS}, handle), _second_interrupt_exits():
        yield stop


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that ``finally`` blocks run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, frame: Any) -> None:
        sys.exit(128 + signum)

    with _handled(set(ENDINGS), handle):
        yield


def interrupt_once() -> None:
    """Let a Ctrl-C raise KeyboardInterrupt only once, even if the key is held down.

    A second one while the first is being handled would print a traceback. If a shell ignores
    SIGINT for the program, as for background jobs, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    patient_until = 0.0

    def handle(signum: int, frame: Any) -> None:
        nonlocal patient_until
        now = time.monotonic()
        if now >= patient_until:
            patient_until = now + PATIENCE
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)


@contextlib.contextmanager
def _handled(signals: set[int], handle: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _second_interrupt_exits() -> Iterator[None]:
    """Run ``_watch`` in a thread that receives the number of every signal as it arrives."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reader,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()


def _watch(reader: socket.socket) -> None:
    """Read signal numbers until the other end is closed; a second Ctrl-C exits the program."""
    if not reader.recv(1):
        return
    patient_until = time.monotonic() + PATIENCE
    while (left := patient_until - time.monotonic()) > 0:
        reader.settimeout(left)
        with contextlib.suppress(TimeoutError):
            if not reader.recv(1):
                return
    reader.settimeout(None)
    with contextlib.suppress(OSError):  # the terminal is closed
        print(WAITING, file=sys.stderr, flush=True)
    while number := reader.recv(1):
        if number[0] == signal.SIGINT:
            _exit_at_once()


def _exit_at_once() -> None:
    """Exit now, whatever the main thread is doing, and leave the terminal as it was."""
    remove_temporary_files()
    with contextlib.suppress(OSError):
        cursor = SHOW_CURSOR if has_cursor(sys.stderr) else ""
        print(f"{cursor}\nmlx-kda: quit without saving", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)
