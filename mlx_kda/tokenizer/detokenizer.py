"""Text from tokens one at a time, never with half a character in it."""

import codecs
import json
import re

from tokenizers import Tokenizer

from .sentencepiece_model import SPACE
from .tiktoken_model import byte_texts

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteDetokenizer:
    """A streaming detokenizer with the interface of mlx-lm's.

    Each token is bytes; a character is output when its last byte has come. Control tokens have no
    text. The work per token does not depend on the length of the text.
    """

    def __init__(self, pieces: dict[int, bytes], strip_first_space: bool = False):
        self._pieces = pieces
        self._strip = strip_first_space
        self.reset()

    def reset(self) -> None:
        """Forget the text, keep the vocabulary."""
        self.tokens: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._segments: list[str] = []
        self._given = 0
        self._started = False

    def add_token(self, token: int) -> None:
        """Add one token id; ids without a piece have no text."""
        self.tokens.append(token)
        self._add(self._decoder.decode(self._pieces.get(token, b"")))

    def finalize(self) -> None:
        """Output what is held back; an unfinished character becomes U+FFFD, as in ``decode``."""
        self._add(self._decoder.decode(b"", final=True))
        self._decoder.reset()

    def _add(self, text: str) -> None:
        if text and not self._started:
            self._started = True
            if self._strip:
                text = text.removeprefix(" ")
        if text:
            self._segments.append(text)

    @property
    def text(self) -> str:
        """The whole text so far."""
        self._segments = ["".join(self._segments)]
        self._given = min(self._given, 1)
        return self._segments[0]

    @property
    def last_segment(self) -> str:
        """The text that was completed since this was last read."""
        segment = "".join(self._segments[self._given :])
        self._given = len(self._segments)
        return segment


def token_pieces(tokenizer: Tokenizer, hidden: frozenset[int]) -> tuple[dict[int, bytes], bool]:
    """The bytes of every token, and whether the first space of a text is to be stripped.

    ``hidden`` ids have no text. Supports byte-level and sentencepiece decoders.
    """
    decoder = json.dumps(json.loads(tokenizer.to_str())["decoder"])
    byte_level = '"ByteLevel"' in decoder
    values = {text: value for value, text in byte_texts().items()}
    added = tokenizer.get_added_tokens_decoder()
    pieces: dict[int, bytes] = {}
    for text, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if index in hidden:
            continue
        if index in added:
            pieces[index] = text.encode()
        elif byte_level and all(char in values for char in text):
            pieces[index] = bytes(values[char] for char in text)
        elif not byte_level and (match := BYTE_PIECE.fullmatch(text)):
            pieces[index] = bytes([int(match.group(1), 16)])
        else:
            pieces[index] = text.replace(SPACE, " ").encode()
    return pieces, '"Strip"' in decoder
