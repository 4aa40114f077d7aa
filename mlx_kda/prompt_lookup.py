"""Speculative decoding without a draft model: guess that the sequence repeats itself.

The last tokens are looked up earlier in the sequence; what followed them there is guessed to follow
again, and one forward pass over the guess tells how much of it is right. Every token is drawn from
the model's own logits as in plain decoding. A pass reads the weights once for all its tokens, but
the states and the attention absorb them one by one, as plain steps do: where MLX's matrix products
give a row the same bits beside other rows as alone (they do in its CPU build), the tokens are the
same. Where they do not, tokens that hang on a rounding may differ.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from .cache import checkpoints
from .context import CLEAR_EVERY, Context
from .errors import UserError
from .sampling import Sampling, TokenBuffer
from .step import check_finite

MOST = 7  # guessed tokens verified in one pass
NGRAMS = (4, 3, 2)  # lengths of the ending that is looked up, the longest first
SPAN = 65_536  # last tokens in which it is looked up
# After a wrong guess up to so many tokens are read again with the next guess; more of them are read
# without a guess, and kept.
REPLAY = 8
AHEAD = REPLAY + 1 + 2 * MOST  # no pass is over more tokens


@dataclass
class Acceptance:
    """Tokens guessed, guesses that were right, and forward passes."""

    drafted: int = 0
    accepted: int = 0
    passes: int = 0


class Index:
    """Where each ending of a sequence last occurred before, kept up to date token by token."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        # An ending is entered once its next token is known: it never finds itself.
        end = len(self.tokens)
        for n in NGRAMS:
            if end >= n:
                self._after[tuple(self.tokens[end - n :])] = end
        self.tokens.append(token)

    def guess(self, most: int) -> list[int]:
        """Up to ``most`` tokens that followed the longest known ending."""
        for n in NGRAMS:
            if len(self.tokens) >= n:
                at = self._after.get(tuple(self.tokens[-n:]))
                if at is not None:
                    return self.tokens[at : at + most]
        return []


def decode(
    context: Context,
    max_tokens: int,
    sampling: Sampling,
    acceptance: Acceptance,
) -> Generator[int, None, None]:
    """Yield what ``context.decode`` yields, in fewer passes where the sequence repeats itself.

    While the iterator is open the context's cache may be ahead of its tokens or behind; once it is
    closed or exhausted the context has absorbed exactly the tokens yielded.
    """
    if context.logits is None:
        raise UserError("nothing to continue from: prefill at least one token")
    checkpoints.check_supported(context.cache)
    if context.room is not None:
        max_tokens = min(max_tokens, context.room)
    if max_tokens <= 0:
        return
    index = Index(context.tokens[-SPAN:])
    anchor = checkpoints.snapshot(context.cache, AHEAD)
    since: list[int] = []  # yielded after the anchor
    check_finite(mx.isfinite(context.logits).all(), len(context.tokens))
    buffer = TokenBuffer(context.tokens) if sampling.processors else None
    token = cast(int, sampling.draw(context.logits, len(context.tokens), buffer).item())
    left = max_tokens
    try:
        while True:
            since.append(token)
            index.append(token)
            if buffer is not None:
                buffer.extend(mx.array([token]))
            left -= 1
            yield token
            if not left:
                return
            guess = index.guess(min(MOST, left - 1)) if len(since) <= REPLAY else []
            logits, drawn = _verify(context, since, guess, sampling, buffer)
            right = next((i for i, t in enumerate(guess) if drawn[i] != t), len(guess))
            if buffer is not None:
                buffer.cut(len(context.tokens) + len(since) + right)
            acceptance.drafted += len(guess)
            acceptance.accepted += right
            acceptance.passes += 1
            if acceptance.passes % CLEAR_EVERY == 0:
                mx.clear_cache()
            for token in guess[:right]:
                since.append(token)
                index.append(token)
                left -= 1
                yield token
            token = drawn[right]
            if right == len(guess):
                context.tokens += since
                context.logits = logits
                anchor, since = checkpoints.snapshot(context.cache, AHEAD), []
            else:
                checkpoints.restore(context.cache, anchor)
    finally:
        if since:
            checkpoints.restore(context.cache, anchor)
            with _one_by_one(context.cache):
                context.prefill(since)


def _verify(
    context: Context,
    since: list[int],
    guess: list[int],
    sampling: Sampling,
    buffer: TokenBuffer | None,
) -> tuple[mx.array, list[int]]:
    """Logits after everything, and the token drawn after ``since`` and after each guess.

    ``buffer`` holds what comes before the guess, and the guess too in the end.
    """
    with _one_by_one(context.cache):
        out = context.model(mx.array([since + guess]), cache=context.cache)[0]
    rows = [out[i : i + 1] for i in range(len(since) - 1, len(since) + len(guess))]
    known = len(context.tokens) + len(since)
    if buffer is not None and guess:
        buffer.extend(mx.array(guess))
    drawn = [sampling.draw(row, known + i, buffer) for i, row in enumerate(rows)]
    finite = mx.isfinite(out).all()
    mx.eval(drawn, finite, rows[-1], context.states())
    check_finite(finite, known)
    return rows[-1], [cast(int, token.item()) for token in drawn]


@contextmanager
def _one_by_one(cache: list[Any]) -> Iterator[None]:
    """Let the layers absorb the tokens of a pass one by one, as steps of decoding do."""
    for entry in cache:
        entry.one_by_one = True
    try:
        yield
    finally:
        for entry in cache:
            entry.one_by_one = False
