"""Files that are whole or not there, and the folder for what can be made again."""

import contextlib
import fcntl
import glob
import os
import platform
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from . import locks


def cache_dir() -> Path:
    """Where compiled kernels and self-checks are kept; it can be deleted at any time.

    ``~/Library/Caches/mlx-kda`` on a Mac, else ``$XDG_CACHE_HOME/mlx-kda`` or
    ``~/.cache/mlx-kda``.
    """
    if platform.system() == "Darwin":
        return Path.home() / "Library" / "Caches" / "mlx-kda"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlx-kda"


# Files of this process that nobody needs after it, for an end that leaves no time to unwind.
passing: set[Path] = set()
_OWNER = re.compile(r"([0-9]+)(\.[0-9a-f]+)?\.tmp")
STALE = 60  # seconds without a write after which a dead process's file counts as left behind


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, synced and renamed to it if the block succeeds.

    Of a link it is the place that the link leads to. No two writers meet in one temporary file, in
    other threads and on other machines neither: the last to end has its file whole under the name.
    What a killed process left behind for the same ``path`` is removed.
    """
    if path.is_symlink():
        path = path.resolve()
    _sweep(path)
    name = f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
    temporary = path.with_name(name)
    with temporary.open("xb") as held:
        passing.add(temporary)
        try:
            locks.try_lock(held)  # it is somebody's, who runs: see _sweep
            with contextlib.suppress(OSError):  # a file that was made private stays so
                os.fchmod(held.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield temporary
            sync(held.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
            passing.discard(temporary)


def hold(lock: Path) -> BinaryIO | None:
    """`locks.acquire`, the lock file gone with this process however it ends, but for a kill."""
    handle = locks.acquire(lock)
    if handle is not None:
        passing.add(lock)
    return handle


def leave(lock: Path, handle: BinaryIO) -> None:
    """Remove and let go of what `hold` gave."""
    locks.release(lock, handle)
    passing.discard(lock)


def sync(file: int) -> None:
    """Write what the system holds of an open file to the disk."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # a Mac's fsync leaves it in the memory of the disk
        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
            return
    os.fsync(file)


def sync_folder(folder: Path) -> None:
    """Make the new names in a folder last through a power cut, where the system allows it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            sync(handle)
        finally:
            os.close(handle)


def discard_passing() -> None:
    """Remove what this process has begun to write or holds, before it ends without unwinding."""
    for temporary in list(passing):
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sweep(path: Path) -> None:
    """Remove temporary files of ``path`` that nobody writes: no lock, no process, no change."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        found = _OWNER.fullmatch(left.name.removeprefix(f".{path.name}."))
        with contextlib.suppress(OSError):
            # By its distance: a clock that was put back leaves files of a time to come.
            old = abs(time.time() - left.stat().st_mtime) > STALE
            if found and old and not _runs(int(found[1])) and _is_free(left):
                left.unlink()


def _is_free(path: Path) -> bool:
    """Whether no process, in another container neither, holds the file."""
    with path.open("rb") as file:
        return locks.try_lock(file)


def _runs(process: int) -> bool:
    """Whether a process of this number runs here."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # somebody else's
    return True


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
