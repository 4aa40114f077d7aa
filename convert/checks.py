"""Checks of a converted folder by itself: files, index, config, tokenizer, shapes, values."""

import unicodedata
from dataclasses import asdict, dataclass, field, replace
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
from .aux_files import read_aux_files
from .compare_errors import Comparison
from .conversion_plan import ConversionPlan
from .quantise import is_cast, is_finite
from .report import REPORT
from .resume import file_hash

PIECE = 32_000_000  # bytes checked at a time
# The built-in text: it must come back from the tokenizer, and logits are compared on it.
SAMPLE = """The river had been low all summer, so when the rain came in September nobody minded at
first. By the third day the lower road was under water, and the school sent the children home. "How
long will it last?" asked Maria, who kept the shop. "Two days," her father said. "It was two days in
1987, and it was worse then." He was right about the days and wrong about the rest.

def running_mean(values, width):
    total, result = 0.0, []
    for i, value in enumerate(values):
        total += value
        if i >= width:
            total -= values[i - width]
        result.append(total / min(i + 1, width))
    return result

1. Boil 500 g of potatoes for 20 minutes. 2. Fry 2 onions in 30 ml of oil. 3. Mix, salt, serve.
If 3 trains leave every 8 minutes, 12 hours see 270 of them: 12 * 60 / 8 * 3 = 270.

线性注意力把历史压缩成一个固定大小的状态，所以无论文本多长，每个词的代价都一样。
Der Speicher wächst nicht mit der Länge. La mémoire reste constante. Память не растёт.
| name | bits | size |
|------|------|------|
| a    | 4    | 27 GB |
"""


@dataclass
class Check:
    """One row of the table."""

    what: str
    found: str
    bound: str
    ok: bool


@dataclass
class Verification:
    """The checks of a folder, and the comparison with its source if one was given."""

    folder: str
    checks: list[Check] = field(default_factory=list)
    comparison: Comparison | None = None

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)

    def add(self, what: str, found: str, bound: str, ok: bool) -> None:
        """Add a check."""
        self.checks.append(Check(what, found, bound, ok))

    def as_dict(self) -> dict[str, Any]:
        """The verification for JSON."""
        result = {"folder": self.folder, "ok": self.ok, "checks": [asdict(c) for c in self.checks]}
        if self.comparison:
            facts = asdict(self.comparison)
            del facts["digests"]
            for name, family in self.comparison.families.items():
                facts["families"][name]["error"] = family.error
            result["comparison"] = facts
        return result


def check_files(
    result: Verification, folder: Path, report: dict[str, Any] | None, progress: Progress | None
) -> None:
    """The files have the checksums in the conversion's report."""
    if report is None:
        damaged = (folder / REPORT).exists()
        found = f"{REPORT} is damaged" if damaged else f"no {REPORT}: not checked"
        result.add("checksums", found, f"as in {REPORT}" if damaged else "-", not damaged)
        return
    files = report.get("files") or {}
    total, done = sum(facts["bytes"] for facts in files.values()), 0
    wrong: list[str] = []
    for name, facts in files.items():

        def on_read(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            if progress:
                progress(done, max(done, total), f"reading {name}")

        if file_hash(folder / name, on_read) != facts["sha256"]:
            wrong.append(name if (folder / name).is_file() else f"{name} (missing)")
    right = f"{len(files) - len(wrong)} of {len(files)} files"
    found = f"{right}; wrong: {listed(wrong)}" if wrong else right
    result.add("checksums", found, "as in conversion.json", not wrong and bool(files))


def check_index(result: Verification, folder: Path, report: dict[str, Any] | None) -> None:
    """The index names every tensor, its file and the total size as the files' headers do.

    A reader may use the index or the headers: both must give the same model.
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
    """The tokenizer loads, and text in several scripts comes back from its ids.

    Decoded at once and streamed, by what ``load_tokenizer`` uses inside transformers, which is slow
    to import and adds nothing to encoding and decoding.
    """
    bound = f"text comes back from its ids, all below {vocab_size:,}"
    if not has_tokenizer(source.folder):
        promised = report is not None and report.get("tokenizer")
        found = "missing" if promised else "none"
        result.add("tokenizer", found, "as in conversion.json", not promised)
        return
    try:
        ids, texts, ends = _try_tokenizer(source)
    except Exception as error:  # other libraries read these files and may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        result.add("tokenizer", f"does not load: {reason}", bound, False)
        return
    if beyond := [i for i in (*ids, *ends) if i >= vocab_size]:
        found = f"gives the id {beyond[0]}"
    elif any(_letters(text) != _letters(SAMPLE) for text in texts):
        found = "the text comes back changed"
    else:
        found = f"{len(ids)} ids, ends at {', '.join(map(str, ends)) or 'none'}"
        result.add("tokenizer", found, bound, True)
        return
    result.add("tokenizer", found, bound, False)


def _try_tokenizer(source: CheckpointSource) -> tuple[list[int], list[str], list[int]]:
    """Ids of the sample text, what they decode to at once and streamed, and the end tokens."""
    found = read_aux_files(source)
    assert found.tokenizer is not None
    tokenizer = found.tokenizer.tokenizer
    control = ControlTokens(tokenizer)
    ids = control.encode_text(SAMPLE, False)
    stream = ByteDetokenizer(*token_pieces(tokenizer, control.special_ids))
    for token in ids:
        stream.add_token(token)
    stream.finalize()
    ends = set(found.eos_ids)
    if (named := token_name(found.tokenizer.config.get("eos_token"))) is not None:
        if (end := tokenizer.token_to_id(named)) is None:
            raise CheckpointError(f"its eos_token {named!r} is not in the vocabulary")
        ends.add(end)
    return ids, [tokenizer.decode(ids, skip_special_tokens=False), stream.text], sorted(ends)


def _letters(text: str) -> str:
    """What must come back of text; a tokenizer may normalise characters and white space."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def check_shapes(result: Verification, plan: ConversionPlan, report: dict[str, Any] | None) -> None:
    """The number of tensors, the dtypes, and what config.json says of quantised weights."""
    outputs, config = plan.mapping.outputs, plan.source.config
    stored = plan.source.tensors
    count = len(plan.source.tensors)
    complete = report is None or count == report["tensors_out"]
    result.add("tensors", f"{count}, all of the right shape", "every tensor of the model", complete)
    stated = DTYPE_WORDS.get(str(config.get("torch_dtype")), plan.dtype)
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
    if plan.mapping.quantized or config.get("quantization"):
        odd = _misstated(plan, config.get("quantization") or {})
        right = f"{len(plan.mapping.quantized)} quantised"
        found = f"{len(odd)} others: {listed(odd)}" if odd else right
        result.add("quantisation", found, "config.json agrees with the shapes", not odd)


def _misstated(plan: ConversionPlan, settings: dict[str, Any]) -> list[str]:
    """Quantised weights whose packing differs between config.json and their shapes."""
    default = {key: settings.get(key) for key in ("group_size", "bits")}
    default["mode"] = settings.get("mode", "affine")
    odd = []
    for path, form in plan.mapping.quantized.items():
        own = settings.get(path)
        stated = {"mode": "affine"} | own if isinstance(own, dict) else default
        if any(stated.get(key) != value for key, value in form.as_config().items()):
            odd.append(path)
    return odd


def check_values(result: Verification, plan: ConversionPlan, progress: Progress | None) -> None:
    """No tensor contains NaN or infinity."""
    tensors = plan.source.tensors
    pieces = {
        f"{name} {number}": piece
        for name, stored in tensors.items()
        if stored.dtype in FLOATS
        for number, piece in enumerate(in_pieces(stored, PIECE))
    }
    total, done = sum(piece.nbytes for piece in pieces.values()), 0
    bad: dict[str, None] = {}
    with Reader(replace(plan.source, tensors=pieces), pieces) as reader:
        for key, piece in pieces.items():
            name = key.rpartition(" ")[0]
            if not is_finite(reader(key)):
                bad[name] = None
            done += piece.nbytes
            if progress:
                progress(done, total, f"looking for NaN in {name}")
    found = f"{len(bad)} are not: {listed(bad)}" if bad else "all"
    result.add("finite", found, "all", not bad)


def has_tokenizer(folder: Path) -> bool:
    """Whether the files of a tokenizer are there."""
    names = ("tokenizer.json", "tiktoken.model", "tokenizer.model")
    return any((folder / name).is_file() for name in names)
