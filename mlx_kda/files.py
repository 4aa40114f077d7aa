"""Files that are whole or not there, and the folder for what can be made again."""

import contextlib
import glob
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path


def cache_dir() -> Path:
    """Where compiled kernels and self-checks are kept; it can be deleted at any time.

    ``~/Library/Caches/mlx-kda`` on a Mac, else ``$XDG_CACHE_HOME/mlx-kda`` or
    ``~/.cache/mlx-kda``.
    """
    if platform.system() == "Darwin":
        return Path.home() / "Library" / "Caches" / "mlx-kda"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlx-kda"


# Temporary files of this process, for an end that leaves no time to unwind.
_unfinished: set[Path] = set()
STALE = 60  # seconds without a write after which a dead process's file counts as left behind


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, synced and renamed to it if the block succeeds.

    The name is the process's own, so that two writers do not meet in it. What a killed process
    left behind for the same ``path`` is removed.
    """
    _sweep(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _unfinished.add(temporary)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        _unfinished.discard(temporary)


def discard_unfinished() -> None:
    """Remove what this process has begun to write, before it ends without unwinding."""
    for temporary in list(_unfinished):
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sweep(path: Path) -> None:
    """Remove temporary files of ``path`` whose process is gone."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        number = left.name.removeprefix(f".{path.name}.").removesuffix(".tmp")
        with contextlib.suppress(OSError):
            old = time.time() - left.stat().st_mtime > STALE
            if number.isdecimal() and old and not _runs(int(number)):
                left.unlink()


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
