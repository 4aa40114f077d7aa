"""Files that are whole or not there, and the folder for what can be made again."""

import contextlib
import os
import platform
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


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, synced and renamed to it if the block succeeds.

    The name is the process's own, so that two writers do not meet in it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
