"""The output folder: its name, what may be there already, the room it needs, and its small files.

It is built beside its final name (see `building`).
"""

import contextlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import new_file, write_text
from ..format import size
from .report import WRITER, ConversionReport

REPORT = "conversion.json"


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
    if _holds_anything(out):
        if not overwrite:
            raise UserError(f"{out} exists and is not empty: choose another, or pass --overwrite")
        if read_report(out) is None:
            raise UserError(f"{out} was not written by mlx-kda and is not overwritten")
    elif out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: name a folder for the output")


def _holds_anything(folder: Path) -> bool:
    """Whether there is a folder with something in it; another process may just be moving it."""
    try:
        return bool(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False


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
    for place in (out.absolute(), *out.absolute().parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return place, shutil.disk_usage(place).free
    raise UserError(f"{out}: no folder on the way to it exists")


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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file whole or not at all."""
    with new_file(target) as temporary:
        shutil.copyfile(source, temporary)
