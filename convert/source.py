"""Where a conversion reads from: a local folder, or a repository of the Hugging Face hub.

Only configs, tokenizer files and safetensors are ever fetched or opened: no Python, no pickles.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_kda.errors import CheckpointError, UserError

from .builder import listed
from .tensor_files import Stored, read_header, read_tensor

INDEX = "model.safetensors.index.json"
HUB_ID = re.compile(r"^\w[\w.-]*/\w[\w.-]*$")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "LICENSE*"]


@dataclass
class Source:
    """A checkpoint folder with its config and the headers of its weight files."""

    name: str  # as the user gave it: a path, or a hub id
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]
    revision: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(stored.nbytes for stored in self.tensors.values())

    def read(self, name: str) -> mx.array:
        """Read one tensor from disk."""
        return read_tensor(self.tensors[name])


def open_source(source: str | Path, revision: str | None = None) -> Source:
    """Open a checkpoint by its folder or hub id, reading configs and headers only.

    Raises UserError or CheckpointError: no such folder, hub out of reach, no checkpoint in it,
    a missing, truncated or damaged file, a tensor stored twice.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        revision = None
    elif folder.exists():
        raise UserError(f"{source} is a file; give the folder that holds config.json")
    elif HUB_ID.match(str(source)):
        folder, revision = _download(str(source), revision)
    else:
        raise UserError(f"{source}: no such folder, and no hub id of the form owner/name")
    return Source(str(source), folder, read_config(folder), read_tensors(folder), revision)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's folder; CheckpointError if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is no checkpoint: it has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: not a JSON object")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder."""
    return read_json(folder / "config.json")


def read_tensors(folder: Path) -> dict[str, Stored]:
    """Headers of all weight files of a folder, by tensor name.

    With an index its files are read and must hold what it says; without one, model*.safetensors,
    or whatever safetensors there are.
    """
    index = folder / INDEX
    placed: dict[str, str] = {}
    if index.exists():
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise CheckpointError(f"{index} is damaged: it has no weight_map")
        files = sorted({str(file) for file in placed.values()})
    else:
        found = [*folder.glob("model*.safetensors")] or [*folder.glob("*.safetensors")]
        files = sorted(path.name for path in found)
    if not files:
        _refuse_folder(folder)
    if outside := [name for name in files if Path(name).name != name]:
        raise CheckpointError(f"{INDEX} names a file outside the folder: {outside[0]}")
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise CheckpointError(f"{INDEX} names files that are missing: {listed(absent)}")

    tensors: dict[str, Stored] = {}
    for file in files:
        for name, stored in read_header(folder / file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{name} is stored twice, in {tensors[name].file.name} and in {file}"
                )
            tensors[name] = stored
    if lost := [name for name in placed if name not in tensors]:
        raise CheckpointError(f"{INDEX} names tensors that no file holds: {listed(lost)}")
    if strays := [name for name, file in placed.items() if tensors[name].file.name != file]:
        raise CheckpointError(f"{INDEX} names the wrong file for {listed(strays)}")
    return tensors


def _refuse_folder(folder: Path) -> None:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise CheckpointError(
            f"{folder} holds PyTorch pickles, which can run code and are not read; "
            "save it as safetensors"
        )
    raise CheckpointError(f"{folder} is no checkpoint: it has no .safetensors file")


def _download(repo: str, revision: str | None) -> tuple[Path, str | None]:
    """Fetch a repository into the hub's cache (which resumes) and return the folder and commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES))
    except GatedRepoError as error:
        raise UserError(
            f"{repo} needs a login: accept its terms and run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{repo} is neither a local folder nor a repository of the Hugging Face hub "
            "(a private one needs `hf auth login`)"
        ) from error
    # the hub's client raises errors of its own, of its HTTP library and of the system
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"{repo} is no local folder and cannot be fetched from the Hugging Face hub: {reason}"
        ) from error
    return folder, folder.name
