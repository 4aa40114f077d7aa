"""Messages as token ids, in which an answer keeps the ids that the model generated.

A new turn never has to rewind the cache: the chat template tells which ids follow an answer, and
the answer itself is never encoded again.
"""

from dataclasses import dataclass, field
from typing import Any

from .errors import UserError
from .tokenizer.control import is_unicode

Message = dict[str, str]

# Stands for an answer while the template is asked for the tokens after it.
_ANSWER = "x"


def chat_ids(tokenizer: Any, messages: list[Message], *, answer: bool = True) -> list[int]:
    """Token ids of ``messages`` under the chat template; ``answer`` adds the answer's opening."""
    if not tokenizer.has_chat_template:
        raise UserError(
            "this model has no chat template: use mlx-kda generate --raw to continue a prompt"
        )
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=answer))


@dataclass
class Transcript:
    """Messages, and the ids that the context was given for them.

    said: index of an answer -> length of ``ids`` up to its end, without its end token.
    """

    messages: list[Message] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    said: dict[int, int] = field(default_factory=dict)

    def ids_for(self, tokenizer: Any, messages: list[Message], *, answer: bool = True) -> list[int]:
        """The ids of ``messages``, with known answers as the model generated them.

        The template is rendered with placeholders for the known answers and cut after the last one;
        what follows is used without encoding the answer's text, which need not give the ids that
        the model chose. Where a template rewrites earlier turns, all of it is encoded again.
        """
        last = self._last_known(messages)
        if last is not None:
            masked = [
                {**m, "content": _ANSWER} if i <= last and m["role"] == "assistant" else m
                for i, m in enumerate(messages)
            ]
            before = chat_ids(tokenizer, masked[:last])
            before += list(tokenizer.encode(_ANSWER, add_special_tokens=False))
            full = chat_ids(tokenizer, masked, answer=answer)
            if full[: len(before)] == before:
                return self.ids[: self.said[last]] + full[len(before) :]
        return chat_ids(tokenizer, messages, answer=answer)

    def update(self, messages: list[Message], ids: list[int]) -> None:
        """Take ``messages`` and their ids; keep the earlier answers that they still contain."""
        last = self._last_known(messages)
        if last is not None and ids[: self.said[last]] == self.ids[: self.said[last]]:
            self.said = {i: n for i, n in self.said.items() if i <= last}
        else:
            self.said = {}
        self.messages, self.ids = messages, ids

    def ends_in_answer(self, tokens: list[int]) -> bool:
        """Whether these are the ids of the messages, the last of which is an answer's."""
        return self.said.get(len(self.messages) - 1) == len(self.ids) and self.ids == tokens

    def cut(self, length: int) -> None:
        """Remove all after the last answer within the first ``length`` ids."""
        self.said = {i: n for i, n in self.said.items() if n <= length}
        last = max(self.said, default=-1)
        self.messages = [
            m for i, m in enumerate(self.messages) if i <= last or m["role"] == "system"
        ]
        self.ids = self.ids[: self.said.get(last, 0)]

    def _last_known(self, messages: list[Message]) -> int | None:
        last = None
        for i, (given, mine) in enumerate(zip(messages, self.messages, strict=False)):
            if given != mine:
                break
            if i in self.said:
                last = i
        return last


def checked(messages: Any) -> list[Message]:
    """A copy of the messages. Raises UserError where they are not valid."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise UserError('messages must be a list like [{"role": "user", "content": "hello"}]')
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise UserError(f"a message must have a role and a content, not {message!r}")
        content = message["content"]
        if isinstance(content, str) and not is_unicode(content):
            raise UserError("a message holds half a surrogate pair, which is not a character")
    return [dict(message) for message in messages]
