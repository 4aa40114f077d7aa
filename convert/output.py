"""The output folder: built beside its final name, file by file, and renamed when it is whole."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_kda.errors import UserError

from .report import WRITER, in_words

REPORT = "conversion.json"
LOCK = ".lock"


def check_output(out: Path, source: Path, overwrite: bool) -> None:
    """Refuse an output that is the source, lies in it, holds it, or holds something else.

    Raises UserError.
    """
    place, origin = out.resolve(), source.resolve()
    if place == origin or origin in place.parents:
        raise UserError(f"the output {out} lies in the source folder; choose another place")
    if place in origin.parents:
        raise UserError(f"the output {out} holds the source folder; choose another place")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise UserError(f"{out} exists and is not empty; choose another, or pass --overwrite")
        if not _is_ours(out):
            raise UserError(f"{out} was not written by mlx-kda and is not overwritten")
    elif out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder for the output")


def _is_ours(folder: Path) -> bool:
    """Whether a conversion wrote the folder, by the report that lies in it."""
    try:
        return json.loads((folder / REPORT).read_text())["written_by"] == WRITER
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_space(out: Path, needed: int) -> None:
    """Refuse a disk that cannot hold `needed` bytes."""
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(f"the output needs {in_words(needed)}, {place} has {in_words(free)} free")


@contextlib.contextmanager
def partial_folder(out: Path) -> Iterator[Path]:
    """A folder `<out>.partial` that becomes `out` if the block succeeds and is removed if it fails.

    An existing output is replaced only at the end. System errors become UserError.
    """
    partial = out.with_name(out.name + ".partial")
    try:
        with _claimed(partial):
            yield partial
            (partial / LOCK).unlink()
            sync_folder(partial)
            _replace(out, partial)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk is full: {out} was not written") from error
        reason = error.strerror or str(error)
        raise UserError(f"{out} cannot be written: {reason}") from error


@contextlib.contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """Make the folder and hold a lock in it, so that no second process writes there.

    What a killed conversion left behind is cleared; a folder of somebody else's is refused.
    """
    lock = partial / LOCK
    if partial.exists() and not lock.is_file():
        raise UserError(f"{partial} is needed for the unfinished output but is something else")
    partial.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another conversion is writing {partial}; wait for it") from None
        for left in partial.iterdir():
            if left != lock:
                left.unlink()
        try:
            yield
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _replace(out: Path, partial: Path) -> None:
    """Put the finished folder in place of an empty or an older one."""
    if not (out.is_dir() and any(out.iterdir())):
        os.rename(partial, out)
        return
    old = Path(tempfile.mkdtemp(prefix=out.name + ".old-", dir=out.parent))
    os.rename(out, old)
    try:
        os.rename(partial, out)
    except BaseException:
        os.rename(old, out)
        raise
    shutil.rmtree(old)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path that is synced and renamed to `path` if the block succeeds."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    with new_file(path) as temporary:
        text = json.dumps(content, indent=2, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file whole or not at all."""
    with new_file(target) as temporary:
        shutil.copyfile(source, temporary)


def sync_folder(folder: Path) -> None:
    """Make the renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
