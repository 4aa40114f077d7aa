"""Ctrl-C and SIGTERM as wishes: a step is finished, what was asked to be saved is saved.

Python runs its signal handlers between two calls, and one call to MLX can be a whole step. So a
thread of its own hears of a signal when it comes: it says that the step is being waited for, and
ends the program at a second Ctrl-C. Files are written under another name first, so that what was
saved before stays whole.
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
from .output import moves

# The terminal was closed, or somebody ends the process: both deserve a clean end.
ENDINGS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
PATIENCE = 0.3  # seconds; what comes in them belongs to the first signal: a key held down, say
WAITING = "(finishing this step; Ctrl-C again ends at once, without saving)"
SHOW_CURSOR = "\033[?25h"  # a progress bar hides it


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
    """Turn signals into a Stop, so that no step is left half done; a second Ctrl-C ends at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(signum: int, frame: Any) -> None:
        if not stop or signum in ENDINGS:
            stop.signal = signum

    with _handled({signal.SIGINT, *ENDINGS}, handle), _heard(_impatient):
        yield stop


def _impatient(ear: socket.socket) -> None:
    """Hear of signals until the other end is closed; a second Ctrl-C ends the program."""
    if not ear.recv(1):
        return
    patient_until = time.monotonic() + PATIENCE
    while (left := patient_until - time.monotonic()) > 0:
        ear.settimeout(left)
        with contextlib.suppress(TimeoutError):
            if not ear.recv(1):
                return
    ear.settimeout(None)
    with contextlib.suppress(OSError):  # nobody sees it: the terminal is closed
        print(WAITING, file=sys.stderr, flush=True)
    while heard := ear.recv(1):
        if heard[0] == signal.SIGINT:
            end_at_once()


def end_at_once() -> None:
    """Leave now, whatever the main thread is in; the terminal is left as it was."""
    remove_temporary_files()
    with contextlib.suppress(OSError):
        cursor = SHOW_CURSOR if moves(sys.stderr) else ""
        print(f"{cursor}\nmlx-kda: ended at once", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)


@contextlib.contextmanager
def _heard(listen: Callable[[socket.socket], None]) -> Iterator[None]:
    """Run ``listen`` in a thread; it receives the number of every signal as it comes."""
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, args=(ear,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        mouth.close()
        thread.join()
        ear.close()


def one_interrupt() -> None:
    """Let a Ctrl-C raise KeyboardInterrupt once, however long the key is held down.

    Another one while the first is on its way up would leave a traceback. Where a shell has denied
    Ctrl-C to the program, as to background jobs, that stays so.
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
