"""Mistakes that can be seen at once: nothing is imported here that takes time to import.

Every command asks these first. What only the files' contents or the machine can tell comes later.
"""

import os
from pathlib import Path
from typing import Any

from ..cache.header import check_session
from ..errors import CheckpointError, UserError
from ..models import read_config as parse_config
from ..weights.folders import find_folder, read_config, refuse_without_weights


def checkpoint(path: str) -> Any:
    """The config of a folder that can run; None for a hub id, about which nothing is known yet.

    Raises UserError for what is neither a folder nor a hub id, and CheckpointError for a folder
    whose config.json is missing, damaged or not supported, or that holds no weights.
    """
    folder = find_folder(path)
    if folder is None:
        return None
    config = parse_config(read_config(folder))
    if next(folder.glob("*.safetensors"), None) is None:
        refuse_without_weights(folder)
    return config


def session(path: str | None) -> None:
    """Raise CheckpointError where a file to go on with is missing or no session."""
    if path is not None:
        check_session(path)


def writable(path: str | None, option: str) -> None:
    """Raise UserError where a file that is to be written at the end cannot be written."""
    if path is None:
        return
    if not path.strip():
        raise UserError(f"{option}: the name is empty")
    file = Path(path).absolute()
    if file.is_dir():
        raise UserError(f"{option} {path} is a folder: name a file")
    if not file.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder to save it in")
    if not os.access(file.parent, os.W_OK):
        raise UserError(f"{option} {path}: its folder cannot be written")


def session_file(path: str | None, option: str = "--session") -> bool:
    """Whether the file of a session is there already; it is one, and can be written."""
    writable(path, option)
    if path is None or not Path(path).exists():
        return False
    session(path)
    return True


def folder(path: str) -> None:
    """Raise UserError for what is neither a folder with a config.json nor a hub id."""
    found = find_folder(path)
    if found is not None:
        read_config(found)


def converted(path: str) -> None:
    """Raise CheckpointError for a path at which there is no config.json."""
    if not path.strip():
        raise UserError("the name of the converted folder is empty")
    if not (Path(path) / "config.json").is_file():
        raise CheckpointError(f"{path} is no converted model: it has no config.json")
