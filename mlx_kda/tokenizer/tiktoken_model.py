"""Kimi's tokenizer: tiktoken.model and the token table of tokenizer_config.json.

The checkpoint brings its rules as Python code, which is never run. That code does this: ranks are
ids, 256 slots follow them, and a slot is named by ``added_tokens_decoder`` or reserved.
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ..errors import CheckpointError

Units = TypeVar("Units", bytes, str)

FILE = "tiktoken.model"
SLOTS = 256
# Han runs; words by case, which exclude Han and keep a contraction; 1-3 digits; punctuation with
# its line ends; line ends; spaces.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def read_ranks(path: Path) -> dict[bytes, int]:
    """The ``base64 rank`` lines of a tiktoken file; ranks must be 0, 1, 2, ... each once.

    Raises CheckpointError naming the line that is damaged or the rank that is missing.
    """
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(
                f"{path} is damaged at line {number}; download it again"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path} is damaged: its ranks are not 0 to {len(ranks) - 1}")
    if any(bytes([value]) not in ranks for value in range(256)):
        raise CheckpointError(f"{path} is damaged: it does not hold all 256 single bytes")
    return ranks


def slot_names(
    first: int, table: dict[int, AddedToken], vocab_size: int | None
) -> list[AddedToken]:
    """The tokens after the ranks, in the order of their ids.

    ``table`` is ``added_tokens_decoder``. Raises CheckpointError where its ids disagree with the
    ranks or with the model's vocabulary, as in renumbered copies.
    """
    end = first + SLOTS if vocab_size is None else min(first + SLOTS, vocab_size)
    if wrong := [i for i in table if not first <= i < end]:
        raise CheckpointError(
            f"the tokenizer's ids disagree: {table[wrong[0]].content} has id {wrong[0]}, but "
            f"control tokens lie between {first} and {end - 1}; get the checkpoint's own files"
        )
    return [
        table.get(i) or AddedToken(f"<|reserved_token_{i}|>", special=True, normalized=False)
        for i in range(first, end)
    ]


def build(path: Path, table: dict[int, AddedToken], vocab_size: int | None) -> Tokenizer:
    """The tokenizer of a tiktoken.model; ids are checked against the model's ``vocab_size``."""
    if not table:
        raise CheckpointError(
            f"{path.parent} lacks added_tokens_decoder in tokenizer_config.json, which names the "
            "control tokens"
        )
    ranks = read_ranks(path)
    added = slot_names(len(ranks), table, vocab_size)
    text = byte_texts()
    spell = {token: "".join(text[value] for value in token) for token in ranks}
    model = models.BPE(
        vocab={spell[token]: rank for token, rank in ranks.items()},
        merges=[(spell[a], spell[b]) for a, b in derive_merges(ranks)],
        ignore_merges=True,  # as tiktoken: a word that is a token is that token
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(added)
    return tokenizer


def byte_texts() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 stands for itself; the others are numbered from U+0100.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in plain]
    return {value: chr(value) for value in plain} | {
        value: chr(0x100 + i) for i, value in enumerate(others)
    }


def added_table(config: dict[str, Any]) -> dict[int, AddedToken]:
    """``added_tokens_decoder`` of a tokenizer_config.json as tokens by id.

    Raises CheckpointError for an entry that is not a token, or one name at two ids.
    """
    table: dict[int, AddedToken] = {}
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        try:
            table[int(key)] = AddedToken(
                entry["content"],
                single_word=bool(entry.get("single_word", False)),
                lstrip=bool(entry.get("lstrip", False)),
                rstrip=bool(entry.get("rstrip", False)),
                normalized=bool(entry.get("normalized", False)),
                special=bool(entry.get("special", False)),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise CheckpointError(
                f"tokenizer_config.json: added_tokens_decoder has a damaged entry {key!r}"
            ) from None
    names = [token.content for token in table.values()]
    if twice := {name for name in names if names.count(name) > 1}:
        raise CheckpointError(
            f"tokenizer_config.json: added_tokens_decoder gives {sorted(twice)[0]} more than one id"
        )
    return table


def derive_merges(ranks: Mapping[Units, int]) -> list[tuple[Units, Units]]:
    """The merge rules of a byte-pair vocabulary that knows ranks only, best rank first.

    tiktoken and sentencepiece repeatedly join the neighbours whose union has the best rank; the
    ``tokenizers`` library wants pairs. One pair per token is enough: the two parts that are left
    when the same joining, applied to the token alone, stops short of the token itself. Inside any
    text the token's span evolves in just that way, or the token is not formed there at all.

    ``ranks`` maps a token, as bytes or as text, to its rank; lower ranks are joined first. Tokens
    that cannot be reached by joining get no pair (they only match a whole word).
    """
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = _join(token, ranks)
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _join(token: Units, ranks: Mapping[Units, int]) -> list[Units]:
    """Join the units of a token by rank, never into the whole token."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        unions = (ranks.get(parts[i] + parts[i + 1]) for i in range(len(parts) - 1))
        found = [(rank, i) for i, rank in enumerate(unions) if rank is not None]
        if not found:
            break
        i = min(found)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts
