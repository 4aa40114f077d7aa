"""Control tokens, and how text is encoded so that none can be typed.

A tokenizer of the ``tokenizers`` library turns ``<|im_end|>`` into the control token wherever it
occurs. Here text is encoded by a copy without control tokens, and a rendered chat is cut at those
control tokens that the template wrote.
"""

import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

# Unicode noncharacters, which no text contains; one that is in none of the inputs marks them.
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class TemplateText(str):
    """Text in which control tokens are control tokens, because a template wrote them.

    ``ids`` is its encoding where that is known already.
    """

    ids: tuple[int, ...] | None

    def __new__(cls, text: str, ids: list[int] | None = None) -> "TemplateText":
        self = super().__new__(cls, text)
        self.ids = None if ids is None else tuple(ids)
        return self


class ControlTokens:
    """The control tokens of a tokenizer, and encoding with and without them."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        content = json.loads(tokenizer.to_str())
        vocab = content["model"]["vocab"]
        own = set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}
        added = tokenizer.get_added_tokens_decoder()
        # a piece of the model's own vocabulary that is not special is a word, not a control token
        self.ids: dict[str, int] = {
            token.content: index
            for index, token in added.items()
            if token.special or token.content not in own
        }
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._plain_json = content

    @cached_property
    def plain(self) -> Tokenizer:
        """The tokenizer without control tokens: their spelling is text to it."""
        content = self._plain_json
        content["added_tokens"] = [
            token for token in content["added_tokens"] if token["content"] not in self.ids
        ]
        vocab = content["model"]["vocab"]
        # a control piece inside the model's vocabulary could match its spelling: rename it there
        unk = content["model"].get("unk_token")
        if isinstance(vocab, list):
            content["model"]["vocab"] = [
                [f"{MARKS[0]}{i}" if piece in self.ids else piece, score]
                for i, (piece, score) in enumerate(vocab)
            ]
        else:
            content["model"]["vocab"] = {
                f"{MARKS[0]}{i}" if piece in self.ids and piece != unk else piece: i
                for piece, i in vocab.items()
            }
        return Tokenizer.from_str(json.dumps(content))

    @cached_property
    def pattern(self) -> re.Pattern:
        """Matches a control token, the longest first."""
        names = sorted(self.ids, key=len, reverse=True)
        if not names:
            return re.compile(r"(?!)")
        # the lookahead makes the search fast where none starts
        return re.compile(f"(?=[{self._openings}])(?:{'|'.join(map(re.escape, names))})")

    @cached_property
    def _openings(self) -> str:
        return "".join(sorted({re.escape(name[0]) for name in self.ids}))

    def encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of text without control tokens, except for BOS or EOS with ``add_special_tokens``."""
        return self.plain.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_template(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of text in which control tokens are control tokens."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def render(self, template: Callable[[Any], str], inputs: Any) -> TemplateText:
        """Render a chat so that only control tokens written by the template become control tokens.

        ``template`` turns inputs (messages, tools and the like) into text. It is rendered as it is,
        and once more with a mark after every character of the inputs at which a control token could
        start. If both hold the same control tokens, none came from the inputs. Otherwise the marked
        text is used, in which the inputs' control tokens are broken up by marks.
        """
        text = template(inputs)
        if not self.ids:
            return TemplateText(text, self.encode_template(text, False))
        mark = self._unused_mark(inputs)
        opening = re.compile(f"[{self._openings}]")
        marked = template(_marked(inputs, opening, mark))
        # a template may escape what is not ASCII
        marked = marked.replace(f"\\u{ord(mark):04x}", mark)
        if self.pattern.findall(text) == self.pattern.findall(marked):
            return TemplateText(text, self.encode_template(text, False))
        return TemplateText(marked.replace(mark, ""), self._encode_marked(marked, mark))

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        ids, start = [], 0
        for match in self.pattern.finditer(text):
            ids += self.encode_text(text[start : match.start()].replace(mark, ""), False)
            ids.append(self.ids[match.group()])
            start = match.end()
        return ids + self.encode_text(text[start:].replace(mark, ""), False)

    def _unused_mark(self, inputs: Any) -> str:
        whole = json.dumps(inputs, ensure_ascii=True, default=str)
        escaped = (mark for mark in MARKS if f"\\u{ord(mark):04x}" not in whole)
        return next(escaped, MARKS[0])


def _marked(value: Any, opening: re.Pattern, mark: str) -> Any:
    """The same structure with a mark after every opening character of its strings, keys too."""
    if isinstance(value, str):
        return opening.sub(lambda match: match.group() + mark, value)
    if isinstance(value, dict):
        return {
            _marked(key, opening, mark): _marked(entry, opening, mark)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [_marked(entry, opening, mark) for entry in value]
    return value


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
