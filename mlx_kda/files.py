"""Files that are whole or not there, and the folder for what can be made again."""

import contextlib
import errno
import fcntl
import glob
import os
import platform
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


def cache_dir() -> Path:
    """Where compiled kernels and self-checks are kept; it can be deleted at any time.

    ``~/Library/Caches/mlx-kda`` on a Mac, else ``$XDG_CACHE_HOME/mlx-kda`` or
    ``~/.cache/mlx-kda``.
    """
    if platform.system() == "Darwin":
        return Path.home() / "Library" / "Caches" / "mlx-kda"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlx-kda"


# Temporary files and locks of this process, for an end that leaves no time to unwind.
passing: set[Path] = set()
_OWNER = re.compile(r"([0-9]+)(\.[0-9a-f]+)?\.tmp")
STALE = 60  # seconds without a write after which a dead process's file counts as left behind
WAIT = 0.1  # seconds for a lock that another process is just releasing
# What a file system without locks answers. Nothing keeps two processes apart there.
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    lock = Lock(temporary)  # somebody writes it: see _sweep
    try:
        with contextlib.suppress(OSError):  # a file that was made private stays so
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        yield temporary
        with temporary.open("rb") as written:
            sync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        lock.release()


class Lock:
    """A lock file that this process holds until ``release``, or until it ends in any way.

    Args:
        path: the lock file, in a folder that exists.
        remove: whether the file goes when the lock is released.

    Raises:
        filelock.Timeout: another process holds the lock.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, remove: bool = True):
        self.path, self._remove = path, remove
        os.stat(path.parent)  # filelock would make a folder that is missing
        self._lock = FileLock(path, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(timeout=WAIT, poll_interval=WAIT / 10)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        self._held = os.stat(path)
        if remove:
            passing.add(path)

    @property
    def is_there(self) -> bool:
        """Whether the file under the path is still the one that is held."""
        try:
            return os.path.samestat(os.stat(self.path), self._held)
        except OSError:
            return False

    def release(self) -> None:
        """Let others have the lock."""
        if self._remove:
            with contextlib.suppress(OSError):
                if self.is_there:
                    self.path.unlink()
            passing.discard(self.path)
        self._lock.release()


def try_lock(path: Path, remove: bool = True) -> Lock | None:
    """A `Lock`, or None where another process holds it."""
    try:
        return Lock(path, remove)
    except Timeout:
        return None


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
            if found and old and not _runs(int(found[1])) and (lock := try_lock(left)):
                lock.release()  # no process has it, in another container neither: it goes


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
