"""Token ids to compare logits on: of a text that is given, or of the one here."""

import json
from pathlib import Path

import mlx.core as mx

from ..errors import UserError

ROW = 512  # tokens of one text; a longer one is cut into several
TEXT = """The river had been low all summer, so when the rain came in September nobody minded at
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


def sample_tokens(folder: Path, vocab_size: int, given: str | Path | None, limit: int) -> mx.array:
    """Ids [B, T] of a text, by the tokenizer of a folder; of a .json file the ids themselves.

    Without a tokenizer the built-in text is a fixed run of ids. Raises UserError where the file
    cannot be read, or has too few tokens or ids beyond the vocabulary.
    """
    ids = _given(folder, Path(given)) if given is not None else _built_in(folder, vocab_size)
    ids = ids[:limit]
    if len(ids) < 2:
        raise UserError(f"{given or 'the text'} has fewer than two tokens")
    if not all(isinstance(i, int) and 0 <= i < vocab_size for i in ids):
        raise UserError(f"{given} holds ids that are not below {vocab_size:,}")
    if len(ids) > ROW:
        ids = ids[: len(ids) // ROW * ROW]
    return mx.array(ids).reshape(-1, min(len(ids), ROW))


def _given(folder: Path, path: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is no UTF-8 text") from error
    if path.suffix != ".json":
        return _encode(folder, text)
    try:
        ids = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    if not isinstance(ids, list):
        raise UserError(f"{path} must hold a list of token ids")
    return ids


def _built_in(folder: Path, vocab_size: int) -> list[int]:
    if not has_tokenizer(folder):
        return [7919 * i * i % vocab_size for i in range(1, ROW + 1)]
    return _encode(folder, TEXT)


def has_tokenizer(folder: Path) -> bool:
    """Whether the files of a tokenizer are there."""
    names = ("tokenizer.json", "tiktoken.model", "tokenizer.model")
    return any((folder / name).is_file() for name in names)


def _encode(folder: Path, text: str) -> list[int]:
    from ..tokenizer import load_tokenizer

    if not has_tokenizer(folder):
        raise UserError(f"{folder} has no tokenizer: give --tokens a .json file of ids")
    return list(load_tokenizer(folder).encode(text))
