"""The output folder: built beside its final name, file by file, and renamed when it is whole."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlx_kda.errors import UserError
from mlx_kda.files import new_file, write_text
from mlx_kda.words import size

from .journal import Journal
from .report import WRITER, ConversionReport

REPORT = "conversion.json"
LOCK, OLD = ".lock", ".old"


def check_output(out: Path, source: Path | None, overwrite: bool) -> None:
    """Refuse an output that is the source, lies in it, holds it, or holds something else.

    Raises UserError.
    """
    if source is not None:
        place, origin = out.resolve(), source.resolve()
        if place == origin:
            raise UserError(f"the output {out} is the source folder: choose another place")
        if origin in place.parents:
            raise UserError(f"the output {out} lies in the source folder: choose another place")
        if place in origin.parents:
            raise UserError(f"the output {out} holds the source folder: choose another place")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise UserError(f"{out} exists and is not empty: choose another, or pass --overwrite")
        if read_report(out) is None:
            raise UserError(f"{out} was not written by mlx-kda and is not overwritten")
    elif out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: name a folder for the output")


def read_report(folder: Path) -> dict[str, Any] | None:
    """The report of the conversion that wrote a folder; None if there is none, or a damaged one."""
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        ConversionReport.from_dict(report | {"out": ""})  # every fact is there
        files = report["files"].values()
        right = report["written_by"] == WRITER and isinstance(report["tensors_out"], int)
        if right and all(isinstance(f["bytes"], int) and f["sha256"] for f in files):
            return report
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def named(out: str | Path) -> Path:
    """The folder that a user's name stands for: of a link the place that it leads to.

    Raises UserError for "." and the like, beside which no other name can be made.
    """
    out = Path(out).expanduser()
    if out.name in ("", ".."):
        raise UserError(f"the output {out} is a place, not a name: say what the folder is called")
    return out.resolve() if out.is_symlink() else out


def partial_of(out: Path) -> Path:
    """Where an output is built."""
    return out.with_name(out.name + ".partial")


def free_space(out: Path) -> tuple[Path, int]:
    """The folder that exists on the way to an output, and the free bytes of its disk."""
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    return place, shutil.disk_usage(place).free


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder, 0 if there is none."""
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


def space_problem(out: Path, needed: int, cache: Path, download: int) -> str | None:
    """Why the disks cannot hold `needed` more bytes of output and a download; None if they can."""
    place, free = free_space(out)
    if download and os.stat(place).st_dev == os.stat(cache).st_dev:
        needed += download
    if needed > free:
        return f"the output needs {size(needed)}, {place} has {size(free)} free"
    if download > (room := shutil.disk_usage(cache).free if download else 0):
        return f"the download needs {size(download)}, {cache} has {size(room)} free"
    return None


@contextlib.contextmanager
def partial_folder(
    out: Path, identity: dict[str, Any], resume: bool, overwrite: bool, say: Callable[[str], None]
) -> Iterator[Journal]:
    """A folder `<out>.partial` that becomes `out` if the block succeeds.

    If the block fails, finished files stay for --resume, and `say` hears so; with none finished,
    the folder goes. An unfinished conversion that is found is taken up with `resume`, cleared with
    `overwrite`, else refused. An existing output is replaced only at the end, and only with
    `overwrite`. System errors become UserError.
    """
    partial = partial_of(out)
    try:
        with _locked(partial):
            _bring_back(out, partial)
            if not overwrite:  # another process may have finished since it was looked at
                try:
                    check_output(out, None, overwrite)
                except UserError:
                    _remove_unbegun(partial)
                    raise
            journal = Journal(partial)
            _take_up(journal, identity, resume, overwrite)
            try:
                yield journal
            except BaseException:
                if journal.is_begun:
                    say(f"what is finished is kept in {partial}: repeat the command with --resume")
                else:
                    shutil.rmtree(partial, ignore_errors=True)
                raise
            sync_folder(partial)
            _replace(out, partial)
            tidy(out)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk is full: {out} was not written") from error
        reason = error.strerror or str(error)
        raise UserError(f"{out} cannot be written: {reason}") from error


def _take_up(journal: Journal, identity: dict[str, Any], resume: bool, overwrite: bool) -> None:
    if journal.is_begun and (resume or not overwrite):
        if not resume:
            raise UserError(
                f"{journal.folder} holds an unfinished conversion: pass --resume to go on with it, "
                "or --overwrite to begin anew"
            )
        journal.check(identity)
        return
    for left in journal.folder.iterdir():
        if left.name != LOCK:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    journal.begin(identity)


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Make the folder and hold a lock in it, so that no second process writes there.

    A folder of somebody else's is refused.
    """
    lock = partial / LOCK
    if partial.exists() and not lock.is_file():
        raise UserError(f"{partial} is needed for the unfinished output but is something else")
    partial.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another conversion is writing {partial}: wait for it") from None
        if not lock.exists() or lock.stat().st_ino != os.fstat(handle.fileno()).st_ino:
            raise UserError(f"another conversion has just finished {partial}: look at its output")
        yield


def _bring_back(out: Path, partial: Path) -> None:
    """Put an older output back that a process was replacing when it was killed."""
    old = partial / OLD
    if old.is_dir() and not out.exists():
        os.rename(old, out)


def _remove_unbegun(partial: Path) -> None:
    """Remove a folder that holds no work of a conversion."""
    if not Journal(partial).is_begun:
        shutil.rmtree(partial, ignore_errors=True)


def tidy(out: Path) -> None:
    """Remove what only an unfinished output needs, from one that is whole."""
    if (out / OLD).is_dir():
        shutil.rmtree(out / OLD)
    Journal(out).remove()
    (out / LOCK).unlink(missing_ok=True)


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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


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
