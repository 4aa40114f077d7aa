"""The folder `<out>.partial` in which one process at a time builds an output, until it is renamed.

.lock   held by the process that works there
.old    the output of before, while it is being replaced
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import Lock, sync_folder, try_lock
from .journal import Journal
from .output import partial_of

LOCK, OLD = ".lock", ".old"
ATTEMPTS = 100


@contextlib.contextmanager
def locked(out: Path) -> Iterator[Path]:
    """The folder to build an output in, which no other process writes to meanwhile.

    At the end it is removed where it holds no work. An older output that a killed process was
    replacing is put back first. Raises UserError where another process is at work, where a folder
    of somebody else's has the name, and for errors of the system.
    """
    partial = partial_of(out)
    try:
        lock = _acquire(partial)
        try:
            _bring_back(out, partial)
            yield partial
        finally:
            if lock.is_there and not Journal(partial).is_begun:
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
    say: Callable[[str], None],
    check: Callable[[], None],
) -> Iterator[Journal]:
    """A locked folder that becomes `out` if the block succeeds.

    If the block fails, finished files stay for --resume, and `say` hears so. An unfinished
    conversion that is found is taken up with `resume`, cleared with `overwrite`, else refused.
    `check` raises UserError where there is an output that is not to be replaced; it is asked again
    at the end, for what has appeared there meanwhile.
    """
    check()
    journal = Journal(partial)
    _take_up(journal, identity, resume, overwrite)
    try:
        yield journal
        check()
    except BaseException:
        if journal.is_begun:
            say(f"what is finished is kept in {partial}: repeat the command with --resume")
        raise
    sync_folder(partial)
    _replace(out, partial)
    tidy(out)


def _take_up(journal: Journal, identity: dict[str, Any], resume: bool, overwrite: bool) -> None:
    if journal.is_begun and (resume or not overwrite):
        if not resume:
            raise UserError(
                f"{journal.folder} holds an unfinished conversion: pass --resume to go on with it, "
                "or --overwrite to begin anew"
            )
        journal.check(identity)
        return
    _empty(journal.folder)
    journal.begin(identity)


def _acquire(partial: Path) -> Lock:
    """Make the folder and hold the lock in it; the open lock file.

    Another process may rename or remove the folder between any two steps: then all begins again.
    """
    for _ in range(ATTEMPTS):
        try:
            partial.mkdir(parents=True, exist_ok=True)
            # Seen twice, it is not one that was renamed and tidied while it was looked at.
            if _is_foreign(partial) and _is_foreign(partial):
                raise FileExistsError
            lock = try_lock(partial / LOCK, remove=False)
        except FileNotFoundError:
            continue
        except FileExistsError:
            raise UserError(
                f"{partial} is needed for the unfinished output but is something else"
            ) from None
        if lock is None:
            raise UserError(f"another conversion is writing {partial}: wait for it")
        return lock
    raise UserError(f"{partial / LOCK} cannot be made: remove {partial}")


def _is_foreign(partial: Path) -> bool:
    """Whether a folder holds something and no lock, which ours have before and after all else."""
    names = os.listdir(partial)
    return bool(names) and LOCK not in names


def _bring_back(out: Path, partial: Path) -> None:
    """Put an older output back that a process was replacing when it was killed."""
    old = partial / OLD
    if old.is_dir() and not out.exists():
        os.rename(old, out)


def _replace(out: Path, partial: Path) -> None:
    """Put the finished folder in place of an empty or an older one.

    The older one goes into the new one first, so that it has a place whenever the process is
    killed: `_bring_back` finds it there, or `tidy` removes it.
    """
    if out.is_dir() and any(out.iterdir()):
        os.rename(out, partial / OLD)
    try:
        os.rename(partial, out)
    except BaseException:
        _bring_back(out, partial)
        raise


def tidy(out: Path) -> None:
    """Remove what only an unfinished output needs, from one that is whole.

    Two processes may do so at once: the one that has just finished, and one that finds it whole.
    """
    while (out / OLD).is_dir():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(out / OLD)
    Journal(out).remove()
    (out / LOCK).unlink(missing_ok=True)


def _empty(folder: Path) -> None:
    """Remove everything but the lock."""
    for left in folder.iterdir():
        if left.name != LOCK:
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def _discard(partial: Path) -> None:
    """Remove the folder, the lock last: without one it would look like somebody else's."""
    if (partial / OLD).exists():
        return  # somebody's output, whose place was taken meanwhile
    with contextlib.suppress(OSError):
        _empty(partial)
        (partial / LOCK).unlink()
        partial.rmdir()
