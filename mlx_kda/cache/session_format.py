"""Session files: one safetensors file with all that a context holds, and which model it belongs to.

Metadata of the file: ``format``, ``version``, ``program`` (mlx-kda's version), ``model`` (the
model's fingerprint), ``policy``, ``checkpoints`` (offset and automatic of each, JSON), ``session``
(what the session adds, JSON).
Tensors: ``layers.I.J`` for array J of layer I, ``logits``, and the same under ``checkpoints.K.``;
``tokens``, the ids absorbed, and ``ids``, those of the messages (int32; left out where there are
none); ``crc32``, the last four bytes of the file, little-endian: the CRC-32 of the whole file with
these bytes 0.

This module imports MLX where it reads arrays only: the command line checks a file's header before
MLX is imported.
"""

import json
import re
import struct
import zlib
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from .. import __version__
from ..errors import CheckpointError, UserError
from ..files import new_file, sync_folder
from .policy import kda_shapes, mla_shapes

if TYPE_CHECKING:
    import mlx.core as mx

FORMAT, VERSION = "mlx-kda session", "2"
LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors library
PIECE_BYTES = 8_000_000  # written, and read for the checksum, at a time
CRC_BYTES = 4
_NAME = re.compile(r"((checkpoints\.[0-9]+\.)?(layers\.[0-9]+\.[0-9]+|logits))|tokens|ids|crc32")
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32"}

Parts = list["mx.array"]  # of one tensor, along the axis of its rows


def save(
    path: str | Path, context: Any, model: str, session: dict[str, Any], ids: list[int]
) -> None:
    """Write a context to a file, whole or not at all; an older file stays until the new one is.

    ``model`` is the fingerprint of the context's model, ``session`` what the session adds, ``ids``
    those of its messages. Checkpoints that were taken by hand are kept, and the newest automatic
    ones. Raises UserError where the file cannot be written.
    """
    path = Path(path)
    checkpoints = context.checkpoints.to_save()
    tensors = _layers([_exported(entry) for entry in context.cache])
    if context.logits is not None:
        tensors["logits"] = [context.logits]
    for k, point in enumerate(checkpoints):
        held = _layers([_snapshot_arrays(entry) for entry in point.snapshot])
        if point.logits is not None:
            held["logits"] = [point.logits]
        tensors |= {f"checkpoints.{k}.{name}": parts for name, parts in held.items()}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "program": __version__,
        "model": model,
        "policy": str(context.policy),
        "checkpoints": json.dumps([[point.offset, point.automatic] for point in checkpoints]),
        "session": json.dumps(session, ensure_ascii=False),
    }
    numbers = {"tokens": context.tokens, "ids": ids}
    try:
        with new_file(path) as temporary:
            _write(temporary, metadata, tensors, {n: ids for n, ids in numbers.items() if ids})
        sync_folder(path.parent)
    except OSError as error:
        before = "; the previous file is untouched" if path.is_file() else ""
        raise UserError(f"cannot save {path}: {error.strerror}{before}") from error


def _exported(entry: Any) -> list[Parts]:
    """The arrays of one layer's cache as they are saved."""
    if hasattr(entry, "export"):  # a LatentCache
        return entry.export()
    if not isinstance(getattr(entry, "cache", None), list):
        raise UserError(f"a cache of {type(entry).__name__} cannot be saved")
    return [[array] for array in entry.cache if array is not None]


def _snapshot_arrays(held: Any) -> list[Parts]:
    """The arrays of one layer's snapshot; none where it is a length, the rows are saved already."""
    arrays = held[1] if isinstance(held, tuple) else [] if isinstance(held, int) else held
    return [[array] for array in arrays if array is not None]


def _layers(entries: list[list[Parts]]) -> dict[str, Parts]:
    return {
        f"layers.{i}.{j}": parts for i, entry in enumerate(entries) for j, parts in enumerate(entry)
    }


def _write(
    path: Path, metadata: dict[str, str], tensors: dict[str, Parts], numbers: dict[str, list[int]]
) -> None:
    """Write the tensors, the int32 ``numbers`` and the checksum, a piece at a time."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0

    def add(name: str, dtype: str, shape: list[int], nbytes: int) -> None:
        nonlocal offset
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes

    for name, parts in tensors.items():
        shape = list(parts[0].shape)
        if len(parts) > 1:
            shape[2] = sum(part.shape[2] for part in parts)
        dtype = _DTYPES[str(parts[0].dtype).removeprefix("mlx.core.")]
        add(name, dtype, shape, sum(part.nbytes for part in parts))
    for name, ids in numbers.items():
        add(name, "I32", [len(ids)], 4 * len(ids))
    add("crc32", "U8", [CRC_BYTES], CRC_BYTES)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[memoryview | bytes]:
        yield struct.pack("<Q", len(text)) + text
        for parts in tensors.values():
            for part in parts:
                flat, step = part.reshape(-1), PIECE_BYTES // part.dtype.size
                for start in range(0, flat.size, step):
                    yield memoryview(cast(Any, flat[start : start + step])).cast("B")
        for ids in numbers.values():
            yield array("i", ids).tobytes()

    crc = 0
    # One piece is computed and summed up while the one before is written.
    with path.open("wb") as file, ThreadPoolExecutor(1) as thread:
        writing = thread.submit(int)
        for piece in pieces():
            crc = zlib.crc32(piece, crc)
            writing.result()
            writing = thread.submit(file.write, piece)
        writing.result()
        file.write(zlib.crc32(bytes(CRC_BYTES), crc).to_bytes(CRC_BYTES, "little"))


def check_session(path: str | Path) -> None:
    """Raise CheckpointError where a file is missing, truncated or not a session of this version.

    Whether its contents are damaged is known when it is loaded.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            _read_header(file, path.name)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error


def _read_header(file: BinaryIO, name: str) -> tuple[dict[str, str], set[str]]:
    """Metadata and names of the tensors of a session file."""
    size = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length) if length <= LARGEST_HEADER else b""
    if length == 0 or len(text) < length <= LARGEST_HEADER:
        raise CheckpointError(f"{name} is truncated, or not an mlx-kda session")
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__")
        found = metadata["format"], metadata["version"]
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError):
        metadata, found, end = {}, (None, None), 0
    if found[0] != FORMAT:
        raise CheckpointError(f"{name} is not an mlx-kda session")
    if found[1] == "1":
        raise CheckpointError(
            f"{name} has session format 1, which this version of mlx-kda no longer reads: "
            "start a new session"
        )
    if found[1] != VERSION:
        raise CheckpointError(
            f"{name} has session format {found[1]}, this program reads {VERSION}: it was written "
            "by a newer mlx-kda: use that version"
        )
    if 8 + length + end > size:
        raise CheckpointError(f"{name} is truncated: {size} bytes of {8 + length + end}")
    return metadata, set(header)


def read(path: str | Path, model: str) -> tuple[dict[str, "mx.array"], dict[str, Any]]:
    """Arrays and metadata of a session of the model with this fingerprint.

    JSON texts in the metadata are decoded, ``tokens`` and ``ids`` are added to it. Raises
    CheckpointError saying what is wrong: not a session, damaged, another version or model.
    """
    import mlx.core as mx  # not at the top of the file, see its head

    path = Path(path)
    try:
        # Held open: another program may save to this name meanwhile.
        with path.open("rb") as file:
            texts, names = _read_header(file, path.name)
            unexpected = next((name for name in names if not _NAME.fullmatch(name)), None)
            if unexpected is not None:
                raise CheckpointError(f"{path.name}: unexpected tensor {unexpected} in the session")
            _check_model(texts, model, path.name)
            _check_crc(file, path.name)
            file.seek(0)
            arrays = cast(dict[str, mx.array], mx.load(file, format="safetensors"))
            mx.eval(arrays)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except RuntimeError as error:  # MLX's, of a header that does not fit the data
        raise CheckpointError(f"{path.name} has a damaged header: {error}") from error
    try:
        tokens, ids = (
            arrays.pop(name).tolist() if name in arrays else [] for name in ("tokens", "ids")
        )
        metadata = {
            **texts,
            "tokens": tokens,
            "ids": ids,
            "checkpoints": [(int(n), bool(a)) for n, a in json.loads(texts["checkpoints"])],
            "session": dict(json.loads(texts["session"])),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path.name} has a damaged header: {error}") from error
    return arrays, metadata


def _check_model(texts: dict[str, str], model: str, name: str) -> None:
    if texts.get("model") != model:
        by = texts.get("program", __version__)
        or_program = "" if by == __version__ else f", or by mlx-kda {by} with other fingerprints"
        raise CheckpointError(
            f"{name} was saved with another model{or_program} (fingerprint {texts.get('model')}, "
            f"this one is {model}): load the model that it was saved with"
        )


def _check_crc(file: BinaryIO, name: str) -> None:
    left, crc = file.seek(0, 2) - CRC_BYTES, 0
    file.seek(0)
    while left > 0:
        piece = file.read(min(left, PIECE_BYTES))
        crc = zlib.crc32(piece, crc)
        left -= len(piece)
    if zlib.crc32(bytes(CRC_BYTES), crc) != int.from_bytes(file.read(CRC_BYTES), "little"):
        raise CheckpointError(
            f"{name} is damaged: its contents are not what was saved (the checksum differs); "
            "name another file, or start a new session"
        )


def restore(
    context: Any, arrays: dict[str, "mx.array"], metadata: dict[str, Any], name: str
) -> None:
    """Put what ``read`` returned into an empty context of the same model and policy.

    ``arrays`` is emptied on the way, so that no layer is held twice. Raises CheckpointError where a
    layer has too many or too few arrays, or not of its shapes.
    """
    tokens, args = metadata["tokens"], context.model.args
    kda = kda_shapes(args)
    latent = [hasattr(entry, "restore") for entry in context.cache]
    shapes = [mla_shapes(args, context.policy, len(tokens)) if mla else kda for mla in latent]
    layers = _checked(arrays, "", shapes if tokens else [[]] * len(shapes), name)
    for i, entry in enumerate(context.cache):
        held, layers[i] = layers[i], []
        if not held:
            continue
        if latent[i]:
            entry.restore(tuple(held), len(tokens))
        else:
            entry.cache = held
    context.tokens, context.logits = tokens, arrays.pop("logits", None)
    ring = context.policy.slots is not None
    for k, (offset, automatic) in enumerate(metadata["checkpoints"]):
        if not 0 <= offset <= len(tokens):
            raise CheckpointError(f"{name} has a checkpoint at {offset} of {len(tokens)} tokens")
        wanted = [
            [] if not offset or (mla and not ring) else layer
            for mla, layer in zip(latent, shapes, strict=True)
        ]
        layers = _checked(arrays, f"checkpoints.{k}.", wanted, name)
        point: list[Any] = []
        for mla, entry, held in zip(latent, context.cache, layers, strict=True):
            if mla:
                point.append((offset, tuple(held)) if ring else offset)
            else:
                point.append(held or [None] * len(entry.cache))
        logits = arrays.pop(f"checkpoints.{k}.logits", None)
        context.checkpoints.add(offset, point, logits, automatic)


def _checked(
    arrays: dict[str, "mx.array"], prefix: str, shapes: list[list], name: str
) -> list[list["mx.array"]]:
    """The arrays of every layer under a prefix, in order, which are taken out of ``arrays``."""
    layers: list[list[mx.array]] = [[] for _ in shapes]
    start = f"{prefix}layers."
    keys = [key for key in arrays if key.startswith(start)]
    for key in sorted(keys, key=lambda key: int(key.rpartition(".")[2])):
        i = int(key.removeprefix(start).partition(".")[0])
        if i >= len(layers):
            raise CheckpointError(
                f"{name} has a layer {i}, but this model has {len(layers)} layers"
            )
        layers[i].append(arrays.pop(key))
    for i, (held, wanted) in enumerate(zip(layers, shapes, strict=True)):
        found = [array.shape for array in held]
        if len(found) != len(wanted):
            raise CheckpointError(
                f"{name}: layer {i} has {len(found)} arrays, the cache of this model has "
                f"{len(wanted)} there"
            )
        if found != wanted:
            raise CheckpointError(f"{name}: layer {i} has shapes {found}, expected {wanted}")
    return layers
