"""The output folder: what may be replaced, the disk it needs, and how it is built.

It is built in ``<out>.partial``, where one process at a time works, and renamed when complete.

.lock   held by the process that works there
.old    the previous output, while it is being replaced
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import Lock, sync_folder, try_lock
from ..format import size
from .report import read_report
from .resume import ResumeState

LOCK, OLD = ".lock", ".old"
ATTEMPTS = 100


def output_path(out: str | Path) -> Path:
    """The output as a path; of a link, its target.

    Raises UserError for "." and the like, beside which no other name can be made.
    """
    out = Path(out).expanduser()
    if out.name in ("", ".."):
        raise UserError(f"the output {out} has no name of its own: give the folder a name")
    return out.resolve() if out.is_symlink() else out


def partial_of(out: Path) -> Path:
    """Where an output is built."""
    return out.with_name(out.name + ".partial")


def check_output(out: Path, source: Path, overwrite: bool) -> None:
    """Raise UserError for an output that is, contains or lies in the source, or is not ours."""
    place, origin = out.resolve(), source.resolve()
    if place == origin:
        raise UserError(f"the output {out} is the source folder: choose another place")
    if origin in place.parents:
        raise UserError(f"the output {out} lies in the source folder: choose another place")
    if place in origin.parents:
        raise UserError(f"the output {out} holds the source folder: choose another place")
    if _holds_anything(out):
        if not overwrite:
            raise UserError(
                f"{out} exists and is not empty: choose another folder, or pass --overwrite"
            )
        if read_report(out) is None:
            raise UserError(f"{out} was not written by mlx-kda and is not overwritten")
    elif out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: name a folder for the output")


def _holds_anything(folder: Path) -> bool:
    """Whether it is a folder with something in it; another process may be moving it."""
    try:
        return bool(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False


def free_space(out: Path) -> tuple[Path, int]:
    """The nearest folder above an output that exists, and the free bytes of its disk."""
    for place in (out.absolute(), *out.absolute().parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return place, shutil.disk_usage(place).free
    raise UserError(f"{out}: none of the folders above it exists")


def space_problem(out: Path, needed: int, cache: Path, download: int) -> str | None:
    """Why the disks cannot hold ``needed`` more bytes of output and a download; None if they can.

    ``cache`` is the folder that the download goes to.
    """
    place, free = free_space(out)
    if download and os.stat(place).st_dev == os.stat(cache).st_dev:
        needed += download
    if needed > free:
        return f"the output needs {size(needed)}, {place} has {size(free)} free"
    if download > (room := shutil.disk_usage(cache).free if download else 0):
        return f"the download needs {size(download)}, {cache} has {size(room)} free"
    return None


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder, 0 if there is none."""
    return sum(size_if_file(path) or 0 for path in folder.glob("*"))


def size_if_file(path: Path) -> int | None:
    """Bytes of a file; None where there is none, or not any more."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


@contextlib.contextmanager
def locked(out: Path) -> Iterator[Path]:
    """The folder to build an output in, which no other process writes to meanwhile.

    At the end it is removed if it holds no finished work. An older output that a killed process
    was replacing is put back first. Raises UserError where another process is at work, where
    a folder of another program has the name, and for errors of the system.
    """
    partial = partial_of(out)
    try:
        lock = _acquire(partial)
        try:
            _restore_old(out, partial)
            yield partial
        finally:
            if lock.is_there and not ResumeState(partial).is_begun:
                _discard(partial)
            lock.release()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk is full: {out} was not written") from error
        reason = error.strerror or str(error)
        raise UserError(f"{out} cannot be written: {reason}") from error


@contextlib.contextmanager
def building(
    out: Path,
    partial: Path,
    identity: dict[str, Any],
    resume: bool,
    overwrite: bool,
    log: Callable[[str], None],
    check: Callable[[], None],
) -> Iterator[ResumeState]:
    """A locked folder that becomes ``out`` if the block succeeds.

    If the block fails, finished files stay for --resume, and ``log`` is told. An unfinished
    conversion found there is continued with ``resume``, removed with ``overwrite``, else refused.
    ``check`` raises UserError where there is an output that must not be replaced; it is called
    again at the end, for what has appeared there meanwhile.
    """
    check()
    state = ResumeState(partial)
    if state.is_begun and resume:
        state.check(identity)
    elif state.is_begun and not overwrite:
        raise UserError(
            f"{partial} holds an unfinished conversion: pass --resume to continue it, or "
            "--overwrite to start again"
        )
    else:
        _empty(partial)
        state.begin(identity)
    try:
        yield state
        check()
    except BaseException:
        if state.is_begun:
            log(f"finished files are kept in {partial}: repeat the command with --resume")
        raise
    sync_folder(partial)
    _replace(out, partial)
    tidy(out)


def tidy(out: Path) -> None:
    """Remove from a complete output what only an unfinished one needs.

    Two processes may do so at once: the one that has just finished, and one that finds it complete.
    """
    while (out / OLD).is_dir():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(out / OLD)
    ResumeState(out).remove()
    (out / LOCK).unlink(missing_ok=True)


def _acquire(partial: Path) -> Lock:
    """Make the folder and take the lock in it.

    Another process may rename or remove the folder between any two steps: then it starts over.
    """
    for _ in range(ATTEMPTS):
        try:
            partial.mkdir(parents=True, exist_ok=True)
            # Seen twice: then it is not one that was renamed and tidied during the first look.
            if _is_foreign(partial) and _is_foreign(partial):
                raise FileExistsError
            lock = try_lock(partial / LOCK, remove=False)
        except FileNotFoundError:
            continue
        except FileExistsError:
            raise UserError(
                f"{partial} is needed for the unfinished output but is something else: move it away"
            ) from None
        if lock is None:
            raise UserError(f"another conversion is writing {partial}: wait for it")
        return lock
    raise UserError(f"{partial / LOCK} cannot be created: remove {partial}")


def _is_foreign(partial: Path) -> bool:
    """Whether a folder holds something but no lock, which ours have before and after all else."""
    names = os.listdir(partial)
    return bool(names) and LOCK not in names


def _restore_old(out: Path, partial: Path) -> None:
    """Put an older output back that a process was replacing when it was killed."""
    old = partial / OLD
    if old.is_dir() and not out.exists():
        os.rename(old, out)


def _replace(out: Path, partial: Path) -> None:
    """Put the finished folder in place of an empty or an older one.

    The older one is moved into the new one first, so that it has a place whenever the process is
    killed: ``_restore_old`` finds it there, or ``tidy`` removes it.
    """
    if out.is_dir() and any(out.iterdir()):
        os.rename(out, partial / OLD)
    try:
        os.rename(partial, out)
    except BaseException:
        _restore_old(out, partial)
        raise


def _empty(folder: Path) -> None:
    """Remove everything but the lock."""
    for left in folder.iterdir():
        if left.name != LOCK:
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def _discard(partial: Path) -> None:
    """Remove the folder, the lock last: without one it would not be recognised as ours."""
    if (partial / OLD).exists():
        return  # an output of another program that appeared meanwhile
    with contextlib.suppress(OSError):
        _empty(partial)
        (partial / LOCK).unlink()
        partial.rmdir()
