"""Whether a file is a session, by its header, before anything heavy is imported.

A safetensors file begins with the length of its header in 8 bytes, little-endian, then that header
in JSON, whose entry ``__metadata__`` maps names to texts.
"""

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

FORMAT, VERSION = "mlx-kda session", "2"
READ = ("1", VERSION)  # 1 has no checksum
LARGEST = 100_000_000  # bytes of a header, the format's own bound


def check_session(path: str | Path) -> None:
    """Raise CheckpointError where a file is missing, unreadable or no session of this version.

    Whether it is whole is known when it is loaded.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= LARGEST else b""
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    if (length <= LARGEST and len(text) < length) or length == 0:
        raise CheckpointError(f"{path.name} is truncated, or no session of mlx-kda")
    try:
        metadata = json.loads(text)["__metadata__"]
    except (KeyError, TypeError, ValueError, RecursionError):
        metadata = None
    _check_format(metadata if isinstance(metadata, dict) else {}, path.name)


def _check_format(metadata: dict[str, Any], name: str) -> None:
    """Raise CheckpointError unless the metadata is that of a session of this version."""
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{name} is no session of mlx-kda")
    if metadata.get("version") not in READ:
        raise CheckpointError(
            f"{name} has session format {metadata.get('version')}, this program reads "
            f"{' and '.join(READ)}: a newer mlx-kda wrote it, use that"
        )
