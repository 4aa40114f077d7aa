"""The chat formats and tokenizers: Kimi's for the hybrid model, sentencepiece for the pure one."""

import base64
from pathlib import Path

import sentencepiece
import tiktoken

# Kimi's pre-tokenizer: a run of Han characters; words by case, Han excluded; up to three
# digits; punctuation; line ends; spaces.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SLOTS = 256  # special tokens after the ranks
PIECES = 2048  # vocabulary of the sentencepiece model
_NAMED = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    254: "[UNK]",
    255: "[PAD]",
}


class Tokenizer:
    """tiktoken over a `tiktoken.model` file, with the special tokens after its ranks."""

    def __init__(self, path: Path):
        lines = path.read_text().split("\n")
        ranks = {base64.b64decode(t): int(r) for t, r in (line.split() for line in lines if line)}
        base = len(ranks)
        self.special = {
            _NAMED.get(i, f"<|reserved_token_{base + i}|>"): base + i for i in range(SLOTS)
        }
        self.size = base + SLOTS
        self.bos, self.eos = self.special["[BOS]"], self.special["[EOS]"]
        self.end, self.pad = self.special["<|im_end|>"], self.special["[PAD]"]
        self._bpe = tiktoken.Encoding(
            "tiny-kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=self.special
        )

    def encode(self, text: str) -> list[int]:
        """Encode text; what looks like a special token stays text."""
        return self._bpe.encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        """Decode ids, special tokens included."""
        return self._bpe.decode(ids)

    def header(self, role: str) -> list[int]:
        """The tokens that open a message of `role` (system, user or assistant)."""
        return [
            self.special[f"<|im_{role}|>"],
            *self.encode(role),
            self.special["<|im_middle|>"],
        ]

    def prompt(self, messages: list[tuple[str, str]]) -> list[int]:
        """The tokens of (role, text) messages and the opening of the assistant's answer."""
        ids: list[int] = []
        for role, text in messages:
            ids += [*self.header(role), *self.encode(text), self.end]
        return ids + self.header("assistant")


class SentencePieceTokenizer:
    """The same interface over a sentencepiece model whose symbols include the chat's marks."""

    MARKS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

    def __init__(self, path: Path):
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.size = self._model.vocab_size()
        self.bos, self.eos = self._model.bos_id(), self._model.eos_id()
        self.special = {
            name: self._model.piece_to_id(name) for name in ("<unk>", "<s>", "</s>", *self.MARKS)
        }
        self.end = self.special["<|end|>"]

    def encode(self, text: str) -> list[int]:
        """Encode text. A mark written in the text becomes the mark: training text has none."""
        return self._model.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Decode ids, marks included."""
        return self._model.decode(ids)

    def header(self, role: str) -> list[int]:
        """The mark that opens a message of `role`."""
        return [self._model.piece_to_id(f"<|{role}|>")]

    def prompt(self, messages: list[tuple[str, str]]) -> list[int]:
        """The tokens of (role, text) messages and the opening of the assistant's answer."""
        ids: list[int] = []
        for role, text in messages:
            ids += [*self.header(role), *self.encode(text), self.end]
        return ids + self.header("assistant")
