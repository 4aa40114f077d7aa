"""Sessions on disk: a safetensors file with all that a context holds, and a header that says whose.

Metadata of the file: ``format``, ``version``, ``program`` (mlx-kda's version), ``model`` (its
fingerprint), ``policy``, ``checkpoints`` (offset and automatic of each, JSON), ``session`` (what
the session adds, JSON).
Tensors: ``layers.I.J`` for array J of layer I, ``logits``, and the same under ``checkpoints.K.``;
``tokens``, the ids absorbed, and ``ids``, those of the messages (int32; left out where there are
none); ``crc32``, the checksum of the whole file, at its end (see ``checksum``).

Version 1 had no checksum, and the ids as JSON in the metadata; it is still read.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import __version__
from ..errors import CheckpointError, UserError
from ..files import new_file, sync_folder
from ..weights.safetensors import Spec, read_header
from ..weights.safetensors_writer import write_file
from . import checksum
from .checkpoints import NEWEST_KEPT, Checkpoint
from .fingerprint import fingerprint
from .header import FORMAT, VERSION, check_session
from .latent_storage import Blocks, Ring
from .latents import LatentCache, packing
from .snapshot import mark

PIECE_BYTES = 8_000_000  # of latents, copied at a time while they are written
WAITING = 4 * PIECE_BYTES  # that may be copied before they are written
_NAME = re.compile(r"((checkpoints\.[0-9]+\.)?(layers\.[0-9]+\.[0-9]+|logits))|tokens|ids|crc32")


@dataclass(frozen=True)
class _Rows:
    """One array of a layer whose rows lie in several blocks; it is never put together."""

    parts: list[mx.array]  # [1, 1, rows, width] each

    @property
    def spec(self) -> Spec:
        *lead, _, width = self.parts[0].shape
        rows = sum(part.shape[2] for part in self.parts)
        return Spec((*lead, rows, width), self.parts[0].dtype)

    def pieces(self) -> Iterator[mx.array]:
        for part in self.parts:
            step = max(1, PIECE_BYTES // (part.shape[3] * part.dtype.size))
            for start in range(0, part.shape[2], step):
                yield part[:, :, start : start + step]


def save(path: str | Path, context: Any, session: dict[str, Any], ids: list[int]) -> None:
    """Write a context to a file, whole or not at all; an older file stays until the new one is.

    ``session`` is what the session adds, ``ids`` those of its messages. Checkpoints that were taken
    by hand are kept, and the newest automatic ones. Raises UserError where the file cannot be
    written.
    """
    path = Path(path)
    kept = _worth_keeping(list(context.checkpoints))
    arrays = _arrays(context.cache, [_content(entry) for entry in context.cache], "")
    if context.logits is not None:
        arrays["logits"] = context.logits
    for k, point in enumerate(kept):
        marks = [held[1] if isinstance(held, tuple) else held for held in point.mark]
        arrays |= _arrays(context.cache, marks, f"checkpoints.{k}.")
        if point.logits is not None:
            arrays[f"checkpoints.{k}.logits"] = point.logits
    for name, numbers in (("tokens", context.tokens), ("ids", ids)):
        if numbers:
            arrays[name] = mx.array(numbers, dtype=mx.int32)
    arrays[checksum.NAME] = mx.zeros(checksum.SPEC.shape, checksum.SPEC.dtype)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "program": __version__,
        "model": fingerprint(context.model),
        "policy": str(context.policy),
        "checkpoints": json.dumps([[point.offset, point.automatic] for point in kept]),
        "session": json.dumps(session, ensure_ascii=False),
    }
    specs = {
        name: array.spec if isinstance(array, _Rows) else Spec(array.shape, array.dtype)
        for name, array in arrays.items()
    }
    data = (
        (name, array.pieces() if isinstance(array, _Rows) else array)
        for name, array in arrays.items()
    )
    crc = checksum.Crc32()
    try:
        with new_file(path) as temporary:
            write_file(temporary, specs, data, metadata=metadata, waiting=WAITING, digest=crc)
            checksum.seal(temporary, crc)
        sync_folder(path.parent)
    except OSError as error:
        before = "; the file of before is untouched" if path.is_file() else ""
        raise UserError(f"cannot save {path}: {error.strerror}{before}") from error


def read(path: str | Path, model: nn.Module) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Arrays and metadata of a session that this model can go on with.

    The metadata with JSON texts decoded, and ``tokens`` and ``ids`` added. Raises CheckpointError
    naming what is wrong: no session, damaged, another version or model.
    """
    path, texts = Path(path), {}
    check_session(path)
    try:
        # Held open: a program that saves meanwhile puts another file in this one's place.
        with path.open("rb", buffering=0) as file:
            stored = read_header(path, texts, file)
            strange = next((name for name in stored if not _NAME.fullmatch(name)), None)
            if strange is not None:
                raise CheckpointError(f"{path.name} holds {strange}, which no session has")
            _check_model(texts, model, path.name)
            checked = texts["version"] != "1"
            arrays = checksum.read_arrays(file, path, stored, checked=checked)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except CheckpointError as error:
        # Without the advice to download it again.
        raise CheckpointError(str(error).replace("; download it again", "")) from error
    try:
        session = dict(json.loads(texts["session"]))
        if texts["version"] == "1":
            tokens, ids = json.loads(texts["tokens"]), session.pop("ids")
        else:
            tokens, ids = (
                arrays.pop(name).tolist() if name in arrays else [] for name in ("tokens", "ids")
            )
        metadata = {
            **texts,
            "tokens": [int(token) for token in tokens],
            "ids": [int(token) for token in ids],
            "checkpoints": [(int(n), bool(a)) for n, a in json.loads(texts["checkpoints"])],
            "session": session,
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path.name} has a damaged header: {error}") from error
    return arrays, metadata


def _check_model(texts: dict[str, str], model: nn.Module, name: str) -> None:
    mine = fingerprint(model)
    if texts.get("model") != mine:
        by = texts.get("program", __version__)
        or_program = "" if by == __version__ else f", or by mlx-kda {by}, which knew it otherwise"
        raise CheckpointError(
            f"{name} was saved with another model{or_program} (fingerprint {texts.get('model')}, "
            f"this one is {mine}): load the model that it was made with"
        )


def fill(context: Any, arrays: dict[str, mx.array], metadata: dict[str, Any], name: str) -> None:
    """Put what ``read`` gave into an empty context of the same model and policy.

    ``arrays`` is emptied, so that what is copied into a layer's blocks is not held twice. Raises
    CheckpointError where a layer has too many or too few arrays, or not of its shapes.
    """
    tokens = metadata["tokens"]
    groups = _groups(arrays)
    cache, model = context.cache, context.model
    wanted = _shapes(cache, model, len(tokens))
    _check(groups, "", wanted if tokens else [[]] * len(cache), name)
    for i, entry in enumerate(cache):
        held = groups.pop(("", i), [])
        if isinstance(entry, LatentCache):
            entry.packing = packing(entry.policy, *_widths(model))
            if held:
                entry.store.load(tuple(held), len(tokens))
                del held
                mx.eval(entry.store.arrays())
        elif held:
            entry.cache = held
    context.tokens, context.logits = tokens, arrays.get("logits")
    for k, (offset, automatic) in enumerate(metadata["checkpoints"]):
        prefix = f"checkpoints.{k}."
        shapes = [
            [] if isinstance(entry, LatentCache) and not isinstance(entry.store, Ring) else shape
            for entry, shape in zip(cache, wanted, strict=True)
        ]
        _check(groups, prefix, shapes if offset else [[]] * len(cache), name)
        point = [
            _as_mark(entry, groups.get((prefix, i), []), offset) for i, entry in enumerate(cache)
        ]
        logits = arrays.get(f"{prefix}logits")
        if not 0 <= offset <= len(tokens):
            raise CheckpointError(f"{name} has a checkpoint at {offset} of {len(tokens)} tokens")
        context.checkpoints.add(Checkpoint(offset, point, logits, automatic))


def _worth_keeping(points: list[Checkpoint]) -> list[Checkpoint]:
    newest = [point for point in points if point.automatic][-NEWEST_KEPT:]
    return [p for p in points if not p.automatic or any(p is one for one in newest)]


def _content(entry: Any) -> Any:
    """The arrays of one layer's cache as they are saved."""
    if not isinstance(entry, LatentCache):
        return mark([entry])[0]
    if isinstance(entry.store, Blocks):
        return [_Rows(list(parts)) for parts in zip(*entry.store.parts(), strict=True)]
    return entry.store.export()


def _arrays(cache: list[Any], content: list[Any], prefix: str) -> dict[str, mx.array | _Rows]:
    named = {}
    for i, (entry, arrays) in enumerate(zip(cache, content, strict=True)):
        if isinstance(arrays, int):
            if not isinstance(entry, LatentCache):
                raise UserError(f"a cache of {type(entry).__name__} cannot be saved")
            continue  # latents that the file has once already
        for j, array in enumerate(arrays or ()):
            if array is not None:
                named[f"{prefix}layers.{i}.{j}"] = array
    return named


def _groups(arrays: dict[str, mx.array]) -> dict[tuple[str, int], list[mx.array]]:
    """(prefix, layer) -> its arrays in order, which are taken out of ``arrays``."""
    numbered: dict[tuple[str, int], dict[int, mx.array]] = {}
    for key in list(arrays):
        prefix, found, place = key.rpartition("layers.")
        if found:
            layer, _, j = place.partition(".")
            numbered.setdefault((prefix, int(layer)), {})[int(j)] = arrays.pop(key)
    return {place: [found[j] for j in sorted(found)] for place, found in numbered.items()}


def _check(groups: dict, prefix: str, wanted: list[list], name: str) -> None:
    beyond = [i for p, i in groups if p == prefix and i >= len(wanted)]
    if beyond:
        raise CheckpointError(f"{name} has a layer {beyond[0]}, this model has {len(wanted)}")
    for i, shapes in enumerate(wanted):
        found = [a.shape for a in groups.get((prefix, i), [])]
        if len(found) != len(shapes):
            raise CheckpointError(
                f"{name}: layer {i} has {len(found)} arrays, the cache of this model has "
                f"{len(shapes)} there"
            )
        if found != shapes:
            raise CheckpointError(f"{name}: layer {i} has shapes {found}, expected {shapes}")


def _widths(model: nn.Module) -> tuple[int, int]:
    return model.args.kv_lora_rank, model.args.qk_rope_head_dim


def _shapes(cache: list[Any], model: nn.Module, tokens: int) -> list[list[tuple[int, ...]]]:
    """Shapes of every layer's arrays after so many tokens."""
    args = model.args
    keys, values = (
        (1, args.linear_conv_kernel_dim - 1, width)
        for width in (args.linear_key_width, args.linear_value_width)
    )
    state = (1, *args.linear_state_shape)
    shapes = []
    for entry in cache:
        if not isinstance(entry, LatentCache):
            shapes.append([keys, keys, values, state])
            continue
        rows = tokens if entry.policy.slots is None else entry.policy.slots
        one = []
        for kept, size in zip(packing(entry.policy, *_widths(model)), _widths(model), strict=True):
            if kept.bits is None:
                one.append((1, 1, rows, size))
            else:
                scales = (1, 1, rows, size // kept.group_size)
                one += [(1, 1, rows, size * kept.bits // 32), scales, scales]
        shapes.append(one)
    return shapes


def _as_mark(entry: Any, arrays: list[mx.array], offset: int) -> Any:
    if not isinstance(entry, LatentCache):
        return arrays or [None] * len(entry.cache)
    if isinstance(entry.store, Ring):
        return (offset, tuple(arrays) or None)
    return offset
