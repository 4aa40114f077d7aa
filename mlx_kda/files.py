"""Files written whole or not at all, lock files, and the cache folder."""

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

STALE = 60  # seconds without a write after which a dead process's temporary file is removed
WAIT = 0.1  # seconds for a lock that another process is just releasing
# What file systems without locks answer. Nothing keeps two processes apart there.
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}
_OWNER = re.compile(r"([0-9]+)(\.[0-9a-f]+)?\.tmp")
_temporary: set[Path] = set()  # temporary files and locks of this process


def cache_dir() -> Path:
    """The folder of compiled kernels and self-checks; it can be deleted at any time.

    ``~/Library/Caches/mlx-kda`` on a Mac, else ``$XDG_CACHE_HOME/mlx-kda`` or
    ``~/.cache/mlx-kda``.
    """
    if platform.system() == "Darwin":
        return Path.home() / "Library" / "Caches" / "mlx-kda"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlx-kda"


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary file that replaces ``path`` if the block succeeds, and is removed otherwise.

    It is synced to disk before the rename. If ``path`` is a symbolic link, its target is replaced.
    Each writer, in any thread or on any machine, has a temporary file of its own; the last to
    finish wins. Temporary files that killed processes left for this ``path`` are removed.
    """
    if path.is_symlink():
        path = path.resolve()
    _remove_stale(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    lock = Lock(temporary)  # tells other processes that it is in use
    try:
        with contextlib.suppress(OSError):  # keep the permissions of the file being replaced
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        yield temporary
        with temporary.open("rb") as written:
            sync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        lock.release()


def write_text(path: Path, text: str) -> None:
    """Write a text file with ``new_file``."""
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


class Lock:
    """A lock file, held until ``release`` or until the process ends, however it ends.

    Args:
        path: the lock file, in a folder that exists.
        remove: whether to remove the file when the lock is released.

    Raises:
        filelock.Timeout: another process holds the lock.
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, remove: bool = True):
        self.path, self._remove = path, remove
        os.stat(path.parent)  # filelock would create a missing folder
        self._lock = FileLock(path, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(timeout=WAIT, poll_interval=WAIT / 10)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        self._held = os.stat(path)
        if remove:
            _temporary.add(path)

    @property
    def is_there(self) -> bool:
        """Whether ``path`` still names the file that is held."""
        try:
            return os.path.samestat(os.stat(self.path), self._held)
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock."""
        if self._remove:
            with contextlib.suppress(OSError):
                if self.is_there:
                    self.path.unlink()
            _temporary.discard(self.path)
        self._lock.release()


def try_lock(path: Path, remove: bool = True) -> Lock | None:
    """A ``Lock``, or None if another process holds it."""
    try:
        return Lock(path, remove)
    except Timeout:
        return None


def sync(file: int) -> None:
    """Flush an open file to the disk."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # fsync on a Mac leaves data in the drive's own cache
        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
            return
    os.fsync(file)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the system allows it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            sync(handle)
        finally:
            os.close(handle)


def remove_temporary_files() -> None:
    """Remove this process's temporary files and locks, before it exits without cleaning up."""
    for temporary in list(_temporary):
        with contextlib.suppress(OSError):
            temporary.unlink()


def _remove_stale(path: Path) -> None:
    """Remove temporary files of ``path`` that are old and belong to no running process."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        found = _OWNER.fullmatch(left.name.removeprefix(f".{path.name}."))
        with contextlib.suppress(OSError):
            # The clock may have been set back since: a time in the future is as stale.
            old = abs(time.time() - left.stat().st_mtime) > STALE
            # The process may run in another container: then it holds the lock.
            if found and old and not _runs(int(found[1])) and (lock := try_lock(left)):
                lock.release()


def _runs(process: int) -> bool:
    """Whether a process of this number runs here."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # another user's
    return True
