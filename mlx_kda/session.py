"""A session: one text or conversation with a model, that is read once and can be taken back.

``Session`` puts together a ``Context`` (cache, tokens, checkpoints), the messages of a conversation
and files on disk. Each turn reads its new tokens only.
"""

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .cache import DEFAULT_BUDGET, Policy, files
from .cache import snapshot as marks
from .cache.checkpoints import Checkpoint
from .cache.report import LayerReport, report
from .context import Context, Progress
from .errors import CheckpointError, UserError
from .generate import Piece, Statistics, decode_text, encode_prompt, stream_generate
from .transcript import Message, Transcript, checked

CHECKPOINT_EVERY = 8192


class Session:
    """A conversation or a long text with one model, in one cache under one policy.

    ``messages`` are {"role", "content"}; an answer that was stopped early is kept as far as it
    came. ``tokens`` is what the cache has absorbed, ``statistics`` what the last generation cost.
    Automatic checkpoints are taken at the ends of messages and after every ``checkpoint_every``
    tokens of prefill, in at most ``checkpoint_bytes``, and thinned from the oldest. One answer is
    given at a time: whatever else is asked of the session closes the iterator of one that is open.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        policy: str | Policy = "exact",
        *,
        system: str | None = None,
        prefill_step: int | None = None,
        checkpoint_every: int = CHECKPOINT_EVERY,
        checkpoint_bytes: int = DEFAULT_BUDGET,
    ):
        """An empty session. Raises UserError for a policy that makes no sense for the model."""
        self.tokenizer = tokenizer
        self.context = Context(model, policy=policy)
        self.context.checkpoints.budget = checkpoint_bytes
        self.prefill_step = prefill_step
        self.checkpoint_every = checkpoint_every
        self.system = system
        self.statistics: Statistics | None = None
        self.transcript = Transcript()
        self._open: Generator[Piece, None, None] | None = None
        self.reset()

    def reset(self) -> None:
        """Begin again, with the system message only."""
        self._close()
        self.context.clear()
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.transcript = Transcript(messages)
        self.statistics = None

    @property
    def tokens(self) -> list[int]:
        """A copy of the ids that the cache has absorbed."""
        return list(self.context.tokens)

    @property
    def messages(self) -> list[Message]:
        return self.transcript.messages

    @property
    def policy(self) -> Policy:
        return self.context.policy

    def layers(self) -> list[LayerReport]:
        """What was asked of each layer's cache, what is in force, and its bytes."""
        return report(self.context.model, self.policy, self.context.cache)

    def _giving(self, pieces: Generator[Piece, None, None]) -> Iterator[Piece]:
        """``pieces``, remembered as the answer that is open."""
        self._open = pieces
        return pieces

    def _close(self) -> None:
        """Close an answer that is open: closed later, it would change what came after it."""
        if self._open is not None and not self._open.gi_running:  # (in its own callback)
            self._open.close()
            self._open = None

    # A text

    def prefill(
        self, prompt: str | Sequence[int] | mx.array, *, progress: Progress | None = None
    ) -> None:
        """Absorb ids, or a text as the tokenizer encodes it, after what was absorbed before."""
        ids = encode_prompt(self.tokenizer, prompt)
        self._close()
        self.context.prefill(
            ids, step=self.prefill_step, progress=progress, every=self.checkpoint_every
        )

    def generate(self, max_tokens: int = 256, **options: Any) -> Iterator[Piece]:
        """Go on from the last token absorbed, piece by piece; ``options`` as for ``decode_text``.

        A token is absorbed when its piece is yielded; closing the iterator early keeps those. An
        answer that the session ends in goes on as the same message.
        """
        if max_tokens < 0:
            raise UserError(f"max_tokens must be 0 or more, not {max_tokens}")
        self._close()
        self.statistics = options.pop("statistics", None) or Statistics()
        self.statistics.prompt_tokens = len(self.context.tokens)
        self.statistics.reused_tokens = len(self.context.tokens)
        pieces = decode_text(
            self.context,
            self.tokenizer,
            max_tokens=max_tokens,
            statistics=self.statistics,
            **options,
        )
        transcript = self.transcript
        end = transcript.said.get(len(transcript.messages) - 1)
        in_answer = end == len(transcript.ids) and transcript.ids == self.context.tokens
        return self._giving(self._say(transcript.ids, pieces) if in_answer else pieces)

    # A conversation

    def send(
        self,
        messages: str | list[Message],
        *,
        prefill_step: int | None = None,
        progress: Progress | None = None,
        statistics: Statistics | None = None,
        **options: Any,
    ) -> Iterator[Piece]:
        """Answer a list of messages, or a text as the next message, piece by piece.

        What the messages share with what was read before is not read again: all of it where they
        go on from there, else as much as the last usable checkpoint holds. ``options`` as for
        ``decode_text``. The messages and whatever was answered are kept when the iterator is closed
        early or ``progress`` raises. What does not fit raises UserError at once and is not kept.
        """
        self._close()
        if isinstance(messages, str):
            messages = [*self.messages, {"role": "user", "content": messages}]
        messages = checked(messages)
        context, transcript = self.context, self.transcript
        wanted = transcript.ids_for(self.tokenizer, messages)
        if context.limit is not None and len(wanted) > context.limit:
            raise UserError(
                f"the conversation of {len(wanted):,} tokens is longer than the model's context "
                f"of {context.limit:,}: shorten the message or begin again"
            )
        read = len(context.tokens)
        goes_on = context.logits is not None and wanted[:read] == context.tokens
        if goes_on and marks.can_mark(context.cache):
            context.take(automatic=True)  # the end of the answer before
        kept = context.reuse(wanted)
        stops = [*self._ends(messages, wanted), len(wanted)]
        self.statistics = Statistics() if statistics is None else statistics
        transcript.go_on(messages, wanted)
        pieces = stream_generate(
            context.model,
            self.tokenizer,
            wanted[kept:],
            context=context,
            prefill_step=self.prefill_step if prefill_step is None else prefill_step,
            progress=progress,
            stops=stops,
            every=self.checkpoint_every,
            statistics=self.statistics,
            **options,
        )
        return self._giving(self._answer(wanted, pieces))

    def _ends(self, messages: list[Message], wanted: list[int]) -> list[int]:
        """Where in ``wanted`` the system message ends, and the one before the last."""
        counts = {len(messages) - 1}
        if messages[0]["role"] == "system":
            counts.add(1)
        ends = []
        for n in counts - {0, len(messages)}:
            ids = self.transcript.ids_for(self.tokenizer, messages[:n], answer=False)
            if wanted[: len(ids)] == ids:
                ends.append(len(ids))
        return ends

    def _answer(self, wanted: list[int], pieces: Iterator[Piece]) -> Iterator[Piece]:
        answer = {"role": "assistant", "content": ""}
        self.transcript.messages = [*self.transcript.messages, answer]
        yield from self._say(wanted, pieces)

    def _say(self, before: list[int], pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Add what comes to the last message; ``before`` are the ids that stand before it."""
        transcript = self.transcript
        answer = transcript.messages[-1]
        said: list[int] = []
        try:
            for piece in pieces:
                answer["content"] += piece.text
                if piece.statistics.finish_reason != "stop":
                    said.append(piece.token)
                yield piece
        finally:
            pieces.close()
            transcript.ids = before + said
            transcript.said[len(transcript.messages) - 1] = len(transcript.ids)

    def undo(self) -> str | None:
        """Take back the last user message and all after it; its text, or None if there is none.

        The context goes back to the last checkpoint before; what lies between is read again with
        the next message.
        """
        self._close()
        at = max((i for i, m in enumerate(self.messages) if m["role"] == "user"), default=None)
        if at is None:
            return None
        text, kept = self.messages[at]["content"], self.messages[:at]
        transcript = self.transcript
        ids = transcript.ids_for(self.tokenizer, kept, answer=False) if kept else []
        transcript.go_on(kept, ids)
        self.context.reuse(ids)
        return text

    def regenerate(self, **options: Any) -> Iterator[Piece]:
        """Answer the last user message again; ``options`` as for ``send``."""
        at = max((i for i, m in enumerate(self.messages) if m["role"] == "user"), default=None)
        if at is None:
            raise UserError("there is no message to answer yet")
        return self.send(self.messages[: at + 1], **options)

    def set_system(self, text: str | None) -> None:
        """Another system message, or none; the conversation stays and is read again."""
        self._close()
        self.system = text
        rest = [m for m in self.messages if m["role"] != "system"]
        first = [] if text is None else [{"role": "system", "content": text}]
        self.transcript = Transcript([*first, *rest])

    # Places in it

    def checkpoint(self) -> Checkpoint:
        """A checkpoint of this place that stays until it is dropped or the text goes back."""
        self._close()
        return self.context.take()

    def drop(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint."""
        self.context.checkpoints.drop(checkpoint)

    def rewind(self, to: Checkpoint | int, *, progress: Progress | None = None) -> None:
        """Go back to a checkpoint or a number of tokens; see ``Context.rewind``.

        Messages beyond the place are forgotten, an answer that it lies in is cut there.
        """
        self._close()
        self.context.rewind(
            to, step=self.prefill_step, progress=progress, every=self.checkpoint_every
        )
        self._forget_messages_beyond(len(self.context.tokens))

    def _forget_messages_beyond(self, length: int) -> None:
        transcript = self.transcript
        said = {i: n for i, n in transcript.said.items() if n <= length}
        last = max(said, default=-1)
        keep = [m for i, m in enumerate(transcript.messages) if i <= last or m["role"] == "system"]
        transcript.messages, transcript.said = keep, said
        transcript.ids = transcript.ids[: said.get(last, 0)]

    def fork(self) -> "Session":
        """Another session that has read and said the same; each goes its own way from here."""
        self._close()
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.context = self.context.fork()
        old = self.transcript
        other.transcript = Transcript(
            [dict(message) for message in old.messages], list(old.ids), dict(old.said)
        )
        return other

    # Files

    def save(self, path: str | Path) -> None:
        """Write the session to a file; an older file there is replaced once this one is whole."""
        self._close()
        files.save(
            path,
            self.context,
            {
                "messages": self.messages,
                "system": self.system,
                "said": list(self.transcript.said.items()),
            },
            self.transcript.ids,
        )

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, tokenizer: Any, **options: Any) -> "Session":
        """The session that ``save`` wrote; ``options`` as for a new one, but for its policy.

        Raises CheckpointError for a file that is no session, is damaged, or is another model's.
        """
        arrays, metadata = files.read(path, model)
        kept = metadata["session"]
        try:
            session = cls(model, tokenizer, metadata["policy"], **options)
            session.transcript = Transcript(
                checked(kept["messages"]) if kept["messages"] else [],
                metadata["ids"],
                {int(i): int(n) for i, n in kept["said"]},
            )
            session.system = kept["system"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{Path(path).name} has a damaged header: {error}") from error
        files.fill(session.context, arrays, metadata, Path(path).name)
        return session
