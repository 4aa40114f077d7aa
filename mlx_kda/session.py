"""A session: a prompt or conversation with one model, which can be rewound, forked and saved.

``Session`` combines a ``Context`` (cache, tokens, checkpoints), the messages of a conversation and
session files. Each turn reads its new tokens only.
"""

import copy
import hashlib
import inspect
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .cache import DEFAULT_BUDGET, Policy, session_format
from .cache.checkpoints import Checkpoint
from .cache.policy import LayerReport, describe
from .context import Context, Progress
from .errors import CheckpointError, UserError
from .generate import Piece, Statistics, decode_text, encode_prompt, stream_generate
from .transcript import Message, Transcript, checked

CHECKPOINT_EVERY = 8192
FINGERPRINT_VALUES = 64  # of each parameter


def fingerprint(model: nn.Module) -> str:
    """16 hex digits that tell one model from another: a saved state fits no other weights.

    Over the config, and each parameter's name, shape, dtype and some values; another quantisation
    or dtype of the same weights is another model.
    """
    digest = hashlib.sha256(repr(getattr(model, "args", None)).encode())
    parameters = sorted(dict(tree_flatten(model.parameters())).items())
    samples = [_bits(array) for _, array in parameters]
    mx.eval(samples)
    for (name, array), sample in zip(parameters, samples, strict=True):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(str(sample.tolist()).encode())
    return digest.hexdigest()[:16]


def _bits(array: mx.array) -> mx.array:
    """The bits of values spread evenly over the array, whatever its dtype."""
    flat = array.reshape(-1)[:: max(1, array.size // FINGERPRINT_VALUES)]
    carrier = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size]
    return mx.contiguous(flat).view(carrier)


Pieces = Generator[Piece, None, None]


class Session:
    """A conversation or a long prompt with one model, in one cache under one policy.

    ``messages`` are {"role", "content"}; an answer that was stopped early is kept up to there.
    ``tokens`` are the ids that the cache has absorbed, ``statistics`` the cost of the last
    generation. Automatic checkpoints are taken at the ends of messages and after every
    ``checkpoint_every`` tokens of prefill, in at most ``checkpoint_bytes``, and thinned from the
    oldest. One answer is generated at a time: any other method closes an iterator that is open.
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
        """An empty session. Raises UserError for a policy that does not suit the model."""
        self.tokenizer = tokenizer
        self.context = Context(model, policy=policy)
        self.context.checkpoints.budget = checkpoint_bytes
        self.prefill_step = prefill_step
        self.checkpoint_every = checkpoint_every
        self.system = system
        self.statistics: Statistics | None = None
        self.transcript = Transcript()
        self._open: Pieces | None = None
        self.reset()

    def reset(self) -> None:
        """Start again, with the system message only."""
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
        """The policy asked for and in force for each layer's cache, and its bytes."""
        model = self.context.model
        return describe(model.args, self.policy, model.model.dtype, self.context.cache)

    def _close(self) -> None:
        """Close an open iterator: closed later, it would change what came after it."""
        if self._open is not None and inspect.getgeneratorstate(self._open) != "GEN_RUNNING":
            self._open.close()  # (it is running where one of its own callbacks calls)
            self._open = None

    # A prompt

    def prefill(
        self, prompt: str | Sequence[int] | mx.array, *, progress: Progress | None = None
    ) -> None:
        """Absorb ids, or text as the tokenizer encodes it, after what was absorbed before."""
        ids = encode_prompt(self.tokenizer, prompt)
        self._close()
        self.context.prefill(
            ids, step=self.prefill_step, progress=progress, every=self.checkpoint_every
        )

    def generate(self, max_tokens: int = 256, **options: Any) -> Pieces:
        """Continue from the last token absorbed; ``options`` as for ``decode_text``.

        A token is absorbed when its piece is yielded; closing the iterator early keeps those. Where
        the session ends in an answer, that message is continued.
        """
        if max_tokens < 0:
            raise UserError(f"max_tokens must be 0 or more, not {max_tokens}")
        self._close()
        self.statistics = options.pop("statistics", None) or Statistics()
        self.statistics.prompt_tokens = len(self.context.tokens)
        self.statistics.reused_tokens = len(self.context.tokens)
        self._open = decode_text(
            self.context,
            self.tokenizer,
            max_tokens=max_tokens,
            statistics=self.statistics,
            **options,
        )
        if self.transcript.ends_in_answer(self.context.tokens):
            self._open = self._record(self.transcript.ids, self._open)
        return self._open

    # A conversation

    def send(
        self,
        messages: str | list[Message],
        *,
        prefill_step: int | None = None,
        progress: Progress | None = None,
        statistics: Statistics | None = None,
        **options: Any,
    ) -> Pieces:
        """Answer a list of messages, or a string as the next user message, piece by piece.

        The prefix that the messages share with what was read before is not read again: all of it
        where they continue it, else as much as the last usable checkpoint holds. ``options`` as for
        ``decode_text``. The messages and the answer so far are kept when the iterator is closed
        early or ``progress`` raises. Messages that do not fit raise UserError at once, and are not
        kept.
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
                f"of {context.limit:,}: shorten the message or start again"
            )
        if context.logits is not None and wanted[: len(context.tokens)] == context.tokens:
            context.take_automatic()  # the end of the previous answer
        kept = context.reuse(wanted)
        stops = [*self._ends(messages, wanted), len(wanted)]
        self.statistics = Statistics() if statistics is None else statistics
        transcript.update(messages, wanted)
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
        self._open = self._answer(wanted, pieces)
        return self._open

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

    def _answer(self, wanted: list[int], pieces: Pieces) -> Pieces:
        answer = {"role": "assistant", "content": ""}
        self.transcript.messages = [*self.transcript.messages, answer]
        yield from self._record(wanted, pieces)

    def _record(self, before: list[int], pieces: Pieces) -> Pieces:
        """Add the pieces to the last message; ``before`` are all ids before them."""
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
        """Remove the last user message and all after it; its text, or None if there is none.

        The context goes back to the last checkpoint before it; the tokens between are read again
        with the next message.
        """
        self._close()
        at = self._last_user_message()
        if at is None:
            return None
        text, kept = self.messages[at]["content"], self.messages[:at]
        ids = self.transcript.ids_for(self.tokenizer, kept, answer=False) if kept else []
        self.transcript.update(kept, ids)
        self.context.reuse(ids)
        return text

    def regenerate(self, **options: Any) -> Pieces:
        """Answer the last user message again; ``options`` as for ``send``."""
        at = self._last_user_message()
        if at is None:
            raise UserError("there is no message to answer yet")
        return self.send(self.messages[: at + 1], **options)

    def _last_user_message(self) -> int | None:
        return max((i for i, m in enumerate(self.messages) if m["role"] == "user"), default=None)

    def set_system(self, text: str | None) -> None:
        """Replace the system message; the conversation is kept, and read again."""
        self._close()
        self.system = text
        rest = [m for m in self.messages if m["role"] != "system"]
        first = [] if text is None else [{"role": "system", "content": text}]
        self.transcript = Transcript([*first, *rest])

    # Checkpoints

    def checkpoint(self) -> Checkpoint:
        """A checkpoint of the present state, valid until dropped or rewound to before it."""
        self._close()
        return self.context.take()

    def drop(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint."""
        self.context.checkpoints.drop(checkpoint)

    def rewind(self, to: Checkpoint | int, *, progress: Progress | None = None) -> None:
        """Go back to a checkpoint or a number of tokens; see ``Context.rewind``.

        Messages beyond that position are removed, those after the last complete answer too.
        """
        self._close()
        self.context.rewind(
            to, step=self.prefill_step, progress=progress, every=self.checkpoint_every
        )
        self.transcript.cut(len(self.context.tokens))

    def fork(self) -> "Session":
        """An independent session with the same content."""
        self._close()
        other = copy.copy(self)
        other.context = self.context.fork()
        other.transcript = copy.deepcopy(self.transcript)
        return other

    # Files

    def save(self, path: str | Path) -> None:
        """Write the session to a file; an older file there is replaced once this one is whole."""
        self._close()
        session_format.save(
            path,
            self.context,
            fingerprint(self.context.model),
            {
                "messages": self.messages,
                "system": self.system,
                "said": list(self.transcript.said.items()),
            },
            self.transcript.ids,
        )

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, tokenizer: Any, **options: Any) -> "Session":
        """The session that ``save`` wrote; ``options`` as for a new one, except for the policy.

        Raises CheckpointError for a file that is not a session, is damaged, or is another model's.
        """
        arrays, metadata = session_format.read(path, fingerprint(model))
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
        session_format.restore(session.context, arrays, metadata, Path(path).name)
        return session
