"""Checks of a converted folder by itself: files, index, config, tokenizer, shapes, values."""

import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from ..format import listed
from ..tokenizer.control import ControlTokens
from ..tokenizer.detokenizer import ByteDetokenizer, token_pieces
from ..tokenizer.files import token_name
from ..weights.safetensors import DTYPE_WORDS, FLOATS, in_pieces, read_header
from ..weights.source import INDEX, CheckpointSource, Reader, read_json, read_placed
from ..weights.weight_mapping import Progress
from .checks import Verification
from .companions import read_companions
from .journal import file_hash
from .layout import Layout
from .output import REPORT
from .quantise import is_cast, is_finite
from .sample import TEXT, has_tokenizer

PIECE = 32_000_000  # bytes looked at at a time


def check_files(
    result: Verification, folder: Path, report: dict[str, Any] | None, progress: Progress | None
) -> None:
    """The checksums that the conversion wrote down."""
    if report is None:
        damaged = (folder / REPORT).exists()
        found = f"{REPORT} is damaged" if damaged else f"no {REPORT}: not checked"
        result.add("checksums", found, f"as in {REPORT}" if damaged else "-", not damaged)
        return
    files = report.get("files") or {}
    total, done, wrong = sum(facts["bytes"] for facts in files.values()), 0, []
    for name, facts in files.items():

        def heard(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            if progress:
                progress(done, max(done, total), f"reading {name}")

        if file_hash(folder / name, heard) != facts["sha256"]:
            wrong.append(name if (folder / name).is_file() else f"{name} (missing)")
    right = f"{len(files) - len(wrong)} of {len(files)} files"
    found = f"{right}; wrong: {listed(wrong)}" if wrong else right
    result.add("checksums", found, "as in conversion.json", not wrong and bool(files))


def check_index(result: Verification, folder: Path, report: dict[str, Any] | None) -> None:
    """The index names every tensor of every weight file, in that file, and their bytes in all.

    A reader may go by the index or by the headers: both must give the same model.
    """
    bound = "what the files' headers say"
    present = {path.name for path in folder.glob("model*.safetensors")}
    if not (folder / INDEX).exists():
        found = f"none, and {len(present)} weight file{'' if len(present) == 1 else 's'}"
        result.add("index", found, bound, len(present) == 1 and report is None)
        return
    try:
        content, placed = read_json(folder / INDEX), read_placed(folder)
        files = sorted(present | set(placed.values()))
        if absent := [name for name in files if not (folder / name).is_file()]:
            raise CheckpointError(f"{INDEX} names files that are missing: {listed(absent)}")
        headers = {name: read_header(folder / name) for name in files}
    except CheckpointError as error:
        result.add("index", str(error), bound, False)
        return
    held = [(name, file) for file, header in headers.items() for name in header]
    lost = [name for name in placed if (name, placed[name]) not in set(held)]
    extra = [f"{name} in {file}" for name, file in held if placed.get(name) != file]
    size = sum(stored.nbytes for header in headers.values() for stored in header.values())
    metadata = content.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    faults = [
        f"not where it says: {listed(lost)}" if lost else "",
        f"not named: {listed(extra)}" if extra else "",
        f"total_size is {stated}, the tensors take {size}" if stated != size else "",
    ]
    faults = [fault for fault in faults if fault]
    found = "; ".join(faults) or f"{len(placed)} tensors, {size:,} bytes"
    result.add("index", found, bound, not faults)


def check_tokenizer(
    result: Verification, source: CheckpointSource, report: dict[str, Any] | None, vocab_size: int
) -> None:
    """The tokenizer loads, and a text in several scripts comes back from its ids.

    Whole and streamed, by what `load_tokenizer` gives without transformers around it, which is slow
    to import and adds nothing to encoding and decoding.
    """
    bound = f"a text comes back, ids below {vocab_size:,}"
    if not has_tokenizer(source.folder):
        promised = report is not None and report.get("tokenizer")
        found = "missing" if promised else "none"
        result.add("tokenizer", found, "as in conversion.json", not promised)
        return
    try:
        ids, texts, ends = _tried(source)
    except Exception as error:  # other libraries read these files too, and can fail in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        result.add("tokenizer", f"does not load: {reason}", bound, False)
        return
    if beyond := [i for i in (*ids, *ends) if i >= vocab_size]:
        found = f"gives the id {beyond[0]}"
    elif any(_letters(text) != _letters(TEXT) for text in texts):
        found = "the text comes back changed"
    else:
        found = f"{len(ids)} ids, ends at {', '.join(map(str, ends)) or 'none'}"
        result.add("tokenizer", found, bound, True)
        return
    result.add("tokenizer", found, bound, False)


def _tried(source: CheckpointSource) -> tuple[list[int], list[str], list[int]]:
    """Ids of the text, what they give back at once and one by one, and the ids that end a reply."""
    found = read_companions(source)
    tokenizer = found.tokenizer.tokenizer
    control = ControlTokens(tokenizer)
    ids = control.encode_text(TEXT, False)
    stream = ByteDetokenizer(*token_pieces(tokenizer, control.special_ids))
    for token in ids:
        stream.add_token(token)
    stream.finalize()
    named = token_name(found.tokenizer.config.get("eos_token"))
    ends = {*found.eos_ids, *([] if named is None else [tokenizer.token_to_id(named)])}
    return ids, [tokenizer.decode(ids, skip_special_tokens=False), stream.text], sorted(ends)


def _letters(text: str) -> str:
    """What must come back of a text; a tokenizer may normalise characters and white space."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def check_shapes(result: Verification, layout: Layout, report: dict[str, Any] | None) -> None:
    """The number of tensors, the dtypes, and what config.json says of packed weights."""
    outputs, config = layout.mapping.outputs, layout.source.config
    stored = layout.source.tensors
    count = len(layout.source.tensors)
    right = report is None or count == report["tensors_out"]
    result.add("tensors", f"{count}, all of the right shape", "every tensor of the model", right)
    stated = DTYPE_WORDS.get(str(config.get("torch_dtype")), layout.dtype)
    odd = []
    for name, spec in outputs.items():
        if spec.dtype in FLOATS:
            wanted = stated if is_cast(name, spec) else mx.float32
            kept = stored.get(name, spec).dtype
            if kept != wanted:
                odd.append(f"{name} ({kept})".replace("mlx.core.", ""))
    found = f"{len(odd)} others: {listed(odd)}" if odd else "right"
    expected = f"{stated}, gates and router bias float32".removeprefix("mlx.core.")
    result.add("dtypes", found, expected, not odd)
    if layout.mapping.quantized or config.get("quantization"):
        odd = _misstated(layout, config.get("quantization") or {})
        found = (
            f"{len(odd)} others: {listed(odd)}"
            if odd
            else f"{len(layout.mapping.quantized)} packed"
        )
        result.add("quantisation", found, "config.json says what the shapes say", not odd)


def _misstated(layout: Layout, settings: dict[str, Any]) -> list[str]:
    """Packed weights of which the config says something else than their shapes."""
    default = {key: settings.get(key) for key in ("group_size", "bits")}
    default["mode"] = settings.get("mode", "affine")
    odd = []
    for path, form in layout.mapping.quantized.items():
        own = settings.get(path)
        stated = {"mode": "affine"} | own if isinstance(own, dict) else default
        if any(stated.get(key) != value for key, value in form.items()):
            odd.append(path)
    return odd


def check_values(result: Verification, layout: Layout, progress: Progress | None) -> None:
    """No tensor holds NaN or infinity."""
    tensors = layout.source.tensors
    pieces = {
        f"{name} {number}": piece
        for name, stored in tensors.items()
        if stored.dtype in FLOATS
        for number, piece in enumerate(in_pieces(stored, PIECE))
    }
    total, done, bad = sum(piece.nbytes for piece in pieces.values()), 0, {}
    with Reader(replace(layout.source, tensors=pieces), pieces) as reader:
        for key, piece in pieces.items():
            name = key.rpartition(" ")[0]
            if not is_finite(reader(key)):
                bad[name] = True
            done += piece.nbytes
            if progress:
                progress(done, total, f"looking for NaN in {name}")
    wrong = list(bad)
    found = f"{len(wrong)} are not: {listed(wrong)}" if wrong else "all"
    result.add("finite", found, "all", not wrong)
