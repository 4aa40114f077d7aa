"""Sessions on disk: a safetensors file with all that a context holds, and a header that says whose.

Metadata of the file: ``format``, ``version``, ``model`` (its fingerprint), ``policy``, ``tokens``
(the ids absorbed, JSON), ``checkpoints`` (offset and automatic of each, JSON), ``session`` (what
the session adds, JSON). Tensors: ``layers.I.J`` for array J of layer I, ``logits``, and the same
under ``checkpoints.K.``.
"""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..convert.tensor_files import Spec, read_header, read_tensor
from ..convert.writing import write_file
from ..errors import CheckpointError, UserError
from ..files import new_file
from .checkpoints import NEWEST_KEPT, Checkpoint
from .fingerprint import fingerprint
from .header import FORMAT, VERSION, check_session
from .latents import LatentCache, packing
from .marks import mark
from .store import Ring


def save(path: str | Path, context: Any, session: dict[str, Any]) -> None:
    """Write a context to a file, whole or not at all; an older file stays until the new one is.

    Checkpoints that were taken by hand are kept, and the newest automatic ones. Raises UserError
    where the file cannot be written.
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
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model": fingerprint(context.model),
        "policy": str(context.policy),
        "tokens": json.dumps(context.tokens),
        "checkpoints": json.dumps([[point.offset, point.automatic] for point in kept]),
        "session": json.dumps(session, ensure_ascii=False),
    }
    specs = {name: Spec(array.shape, array.dtype) for name, array in arrays.items()}
    try:
        with new_file(path) as temporary:
            write_file(temporary, specs, arrays.items(), metadata=metadata)
        _sync_folder(path.parent)
    except OSError as error:
        before = "; the file of before is untouched" if path.is_file() else ""
        raise UserError(f"cannot save {path}: {error.strerror}{before}") from error


def read(path: str | Path, model: nn.Module) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Arrays and metadata (JSON texts decoded) of a session that this model can go on with.

    Raises CheckpointError naming what is wrong: no session, damaged, another version or model.
    """
    path, texts = Path(path), {}
    check_session(path)
    try:
        stored = read_header(path, texts)
    except CheckpointError as error:
        # Without the advice to download it again.
        raise CheckpointError(str(error).partition(";")[0]) from error
    mine = fingerprint(model)
    if texts.get("model") != mine:
        raise CheckpointError(
            f"{path.name} was saved with another model (fingerprint {texts.get('model')}, this one "
            f"is {mine}): load the model that it was made with"
        )
    try:
        metadata = {
            **texts,
            "tokens": [int(token) for token in json.loads(texts["tokens"])],
            "checkpoints": [(int(n), bool(a)) for n, a in json.loads(texts["checkpoints"])],
            "session": dict(json.loads(texts["session"])),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path.name} has a damaged header: {error}") from error
    return {name: read_tensor(one) for name, one in stored.items()}, metadata


def fill(context: Any, arrays: dict[str, mx.array], metadata: dict[str, Any], name: str) -> None:
    """Put what ``read`` gave into an empty context of the same model and policy.

    Raises CheckpointError where a layer has too many or too few arrays, or not of its shapes.
    """
    tokens = metadata["tokens"]
    groups = _groups(arrays, name)
    cache, model = context.cache, context.model
    wanted = _shapes(cache, model, len(tokens))
    _check(groups, "", wanted if tokens else [[]] * len(cache), name)
    for i, entry in enumerate(cache):
        held = groups.get(("", i), [])
        if isinstance(entry, LatentCache):
            entry.packing = packing(entry.policy, *_widths(model))
            if held:
                entry.store.load(tuple(held), len(tokens))
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
    if isinstance(entry, LatentCache):
        return entry.store.export()
    return mark([entry])[0]


def _arrays(cache: list[Any], content: list[Any], prefix: str) -> dict[str, mx.array]:
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


def _groups(arrays: dict[str, mx.array], name: str) -> dict[tuple[str, int], list[mx.array]]:
    """(prefix, layer) -> its arrays in order."""
    numbered: dict[tuple[str, int], dict[int, mx.array]] = {}
    for key, array in arrays.items():
        prefix, found, place = key.rpartition("layers.")
        if found:
            layer, _, j = place.partition(".")
            if not (layer.isdecimal() and j.isdecimal()):
                raise CheckpointError(f"{name} holds {key}, which no session has")
            numbered.setdefault((prefix, int(layer)), {})[int(j)] = array
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


def _sync_folder(folder: Path) -> None:
    """Make the new name last through a power cut, where the system allows it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
