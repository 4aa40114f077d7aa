"""A checkpoint's folder by its file names and JSON files.

Only the standard library is imported, so that mistakes are reported before MLX is loaded.
"""

import json
import re
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UserError

INDEX = "model.safetensors.index.json"
HUB_ID = re.compile(r"^\w[\w.-]*/\w[\w.-]*$")
HUB_ADDRESS = re.compile(r"^(?:https?://[^/]+/|hf://)(\w[\w.-]*/\w[\w.-]*)")
GGUF = ".gguf"
OTHER_FORM = "give a folder in Hugging Face's or MLX's format, with config.json and .safetensors"


def find_folder(source: str | Path) -> Path | None:
    """The folder named; None for a hub id. Raises UserError for what is neither."""
    if not str(source).strip():
        raise UserError("the name of the checkpoint is empty: give a folder or owner/name")
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.suffix.lower() == GGUF and folder.exists():
        raise UserError(f"{source} is a GGUF file, which is not read: {OTHER_FORM}")
    if folder.exists():
        raise UserError(f"{source} is a file: give the folder that holds config.json")
    if (unfinished := folder.with_name(folder.name + ".partial")).is_dir():
        raise UserError(
            f"{source}: no such folder, but {unfinished.name} beside it holds an unfinished "
            "conversion: finish it with convert --resume"
        )
    if HUB_ID.match(str(source)):
        return None
    if address := HUB_ADDRESS.match(str(source)):
        raise UserError(f"{source} is an address: give the hub id {address[1]}")
    raise UserError(f"{source}: no such folder, and not a hub id of the form owner/name")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's folder; CheckpointError if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not a checkpoint: it has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: not a JSON object")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder, without a check of the model's values."""
    if not (folder / "config.json").exists() and any(folder.glob(f"*{GGUF}")):
        raise CheckpointError(f"{folder} holds a GGUF model, which is not read: {OTHER_FORM}")
    config = read_json(folder / "config.json")
    for key in ("quantization", "quantization_config"):
        if not isinstance(config.get(key), dict | None):
            raise CheckpointError(
                f"{folder / 'config.json'} is damaged: {key} is not a JSON object"
            )
    return config


def refuse_without_weights(folder: Path) -> None:
    """Raise CheckpointError for a folder that has no safetensors."""
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise CheckpointError(
            f"{folder} holds PyTorch pickles, which can run code and are not read; "
            "save it as safetensors"
        )
    raise CheckpointError(f"{folder} is not a checkpoint: it has no .safetensors file")
