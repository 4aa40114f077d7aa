"""The program, stopped at a place: what a test does to it then comes neither too early nor late.

Nothing here depends on how fast the machine is; LIMIT only ends what hangs.
"""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LIMIT = 300.0  # seconds
SCRIPT = Path(__file__).with_name("paused_program.py")


def wait_for(
    condition: Callable[[], object], what: str, process: subprocess.Popen | None = None
) -> None:
    """Return once a condition holds.

    AssertionError where it does not within the limit, or a process ends without it.
    """
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, f"{what} did not come within {LIMIT:.0f} s"
        ended = process is not None and process.poll() is not None
        assert not ended or condition(), f"{what} did not come before the process ended"
        time.sleep(0.01)


class Pause:
    """A place (see paused_program.py) at which the program waits, with a folder to meet in."""

    def __init__(self, place: str, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True)
        self.program = [sys.executable, str(SCRIPT), place, str(folder)]

    def reached(self, process: subprocess.Popen | None = None) -> None:
        """Return once the program waits there."""
        wait_for((self.folder / "there").exists, "the place", process)

    def end(self) -> None:
        """Let the program go on."""
        (self.folder / "go").touch()


@contextlib.contextmanager
def started(command: list, **options) -> Iterator[subprocess.Popen]:
    """A process with all its streams in pipes, that is gone at the end, and after the limit.

    It receives Ctrl-C, also where the tests run in a background job, to which shells deny it.
    """
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen([str(word) for word in command], **(pipes | options))
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        watchdog = threading.Timer(LIMIT, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


def told(process: subprocess.Popen, words: str) -> None:
    """Read its standard error through the line with these words."""
    lines = []
    for line in process.stderr:
        lines.append(line.decode())
        if words in lines[-1]:
            return
    raise AssertionError(f"{words!r} was not told: {lines}")
