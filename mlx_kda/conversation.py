"""A conversation kept in one context: each turn reads its new tokens only.

The ids of a turn are worked out so that the cache never has to be taken back: what the model
said stays as the ids it said, and the chat template is asked what stands after an answer.
"""

from collections.abc import Iterator
from typing import Any

from mlx_kda.context import PREFILL_STEP, Context, Progress
from mlx_kda.errors import UserError
from mlx_kda.generate import Piece, Statistics, stream_generate

# Stands for an answer while the template is asked for the tokens after it.
_ANSWER = "x"

Message = dict[str, str]


def chat_ids(tokenizer: Any, messages: list[Message], *, answer: bool = True) -> list[int]:
    """Token ids of ``messages`` under the chat template; ``answer`` adds the answer's opening."""
    if not tokenizer.has_chat_template:
        raise UserError(
            "this model has no chat template: use mlx-kda generate --raw to go on from a text"
        )
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=answer))


class Conversation:
    """Messages and the context that has absorbed them.

    ``messages`` are {"role", "content"}; an answer that was stopped early is kept as far as it
    came. ``context.tokens`` after a turn is the prompt of the turn and the answer's ids, with
    the end token if the model gave one.
    """

    def __init__(self, context: Context, tokenizer: Any, system: str | None = None):
        self.context = context
        self.tokenizer = tokenizer
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Begin again, with the system message only."""
        self.messages: list[Message] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.ids: list[int] = []  # the last turn's prompt and answer, without the end token
        self.context.clear()

    def prompt_ids(self, text: str) -> list[int]:
        """Every id that the context has to hold before the answer to ``text``."""
        user = {"role": "user", "content": text}
        if not self.ids:
            return chat_ids(self.tokenizer, [*self.messages, user])
        # The template's own text with placeholders for the answers, cut at the last answer:
        # what follows the answer, and the new message, are then known without encoding the
        # answer's text again, which need not give the ids that the model chose.
        masked = [
            {**m, "content": _ANSWER} if m["role"] == "assistant" else m for m in self.messages
        ]
        before = chat_ids(self.tokenizer, masked[:-1])
        said = before + list(self.tokenizer.encode(_ANSWER, add_special_tokens=False))
        full = chat_ids(self.tokenizer, [*masked, user])
        if full[: len(said)] == said:
            return self.ids + full[len(said) :]
        # A template that rewrites what went before: the conversation is read anew.
        return chat_ids(self.tokenizer, [*self.messages, user])

    def send(
        self,
        text: str,
        *,
        prefill_step: int = PREFILL_STEP,
        progress: Progress | None = None,
        statistics: Statistics | None = None,
        **options: Any,
    ) -> Iterator[Piece]:
        """Answer ``text``, piece by piece; ``options`` as for ``decode_text``.

        The message and whatever was answered are kept when the iterator is closed early or
        ``progress`` raises. A message that does not fit raises UserError at once and is not
        kept. Where the context's ids do not begin the new prompt (it ended with an end token
        that the template does not use, or a step failed) everything is read again.
        """
        context = self.context
        wanted = self.prompt_ids(text)
        if context.limit is not None and len(wanted) > context.limit:
            raise UserError(
                f"the conversation of {len(wanted):,} tokens is longer than the model's context "
                f"of {context.limit:,}: shorten the message or begin again with /reset"
            )
        read = len(context.tokens)
        if context.tokens != wanted[:read] or (read == len(wanted) and context.logits is None):
            context.clear()
        pieces = stream_generate(
            context.model,
            self.tokenizer,
            wanted[len(context.tokens) :],
            context=context,
            prefill_step=prefill_step,
            progress=progress,
            statistics=statistics,
            **options,
        )
        return self._answer(text, wanted, pieces)

    def _answer(self, text: str, wanted: list[int], pieces: Iterator[Piece]) -> Iterator[Piece]:
        answer = {"role": "assistant", "content": ""}
        self.messages += [{"role": "user", "content": text}, answer]
        self.ids = wanted
        said: list[int] = []
        try:
            for piece in pieces:
                answer["content"] += piece.text
                if piece.statistics.finish_reason != "stop":
                    said.append(piece.token)
                yield piece
        finally:
            pieces.close()
            self.ids = wanted + said
