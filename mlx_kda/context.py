"""What a model has read: its cache and the ids absorbed into it, kept in step."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .cache import Policy
from .cache import snapshot as marks
from .cache.checkpoints import Checkpoint, Checkpoints
from .cache.making import cache_maker
from .errors import UserError
from .sampling import LogitsProcessor, Sampler, Sampling
from .step import (
    NonFiniteLogits,
    cache_arrays,
    check_finite,
    checked_ids,
    context_limit,
    last_logits,
    prefill_step,
    takes_last_only,
)
from .token_buffer import History

# Every so many decoded tokens MLX's cache of free buffers is emptied, so that buffers of
# lengths that will not come again (attention over a growing cache) do not pile up.
CLEAR_EVERY = 256

Progress = Callable[[int, int], None]


class Context:
    """What a model has read: its cache, the ids absorbed into it, and the ways back.

    ``tokens`` and the cache never disagree. A token that ``decode`` has yielded is absorbed,
    a stop token too, because decoding runs one step ahead: closing the iterator early leaves
    the cache as if exactly ``tokens`` had been prefilled. An error or a KeyboardInterrupt in the
    middle of a step undoes that step; logits that are not finite empty the context.

    A recurrent state cannot be trimmed, so going back means going to a checkpoint: ``take`` one,
    ``rewind`` to any length, and ``reuse`` what a new text shares with the old one.
    """

    def __init__(
        self,
        model: nn.Module,
        make_cache: Callable[[], list[Any]] | None = None,
        *,
        policy: str | Policy = "exact",
    ):
        """An empty context; ``make_cache`` gives another cache than the policy's."""
        self.model = model
        self.policy = Policy.parse(policy)
        self._make_cache = make_cache or cache_maker(model, self.policy)
        self.limit = context_limit(model)
        self.checkpoints = Checkpoints()
        self._last_only = takes_last_only(model)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.tokens: list[int] = []
        self.logits: mx.array | None = None  # [1, vocabulary], of the last token absorbed
        self.cache = self._make_cache()
        self.checkpoints.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the cache now, room for tokens to come included; checkpoints are extra."""
        return sum(entry.nbytes for entry in self.cache if not entry.empty())

    @property
    def room(self) -> int | None:
        """Tokens that still fit the model's context, None without a limit."""
        return None if self.limit is None else max(self.limit - len(self.tokens), 0)

    def prefill(
        self,
        ids: Sequence[int],
        *,
        step: int | None = None,
        progress: Progress | None = None,
        stops: Collection[int] = (),
        every: int | None = None,
    ) -> None:
        """Absorb ``ids`` in chunks of at most ``step`` tokens (default: ``prefill_step()``).

        ``progress(done, total)`` is called at the start and after every chunk. What it raises
        ends the prefill between two chunks, with ``tokens`` telling how far it came. Automatic
        checkpoints are taken where ``tokens`` reaches a length in ``stops``, and where ``every``
        tokens have passed since the last one.

        Raises UserError where the model's context is too short, and NonFiniteLogits.
        """
        ids = checked_ids(self.model, ids)
        step = prefill_step() if step is None else step
        if step < 1:
            raise UserError(f"the prefill step must be at least 1 token, not {step}")
        if self.room is not None and len(ids) > self.room:
            raise UserError(
                f"{len(self.tokens) + len(ids):,} tokens do not fit the model's context of "
                f"{self.limit:,}: shorten the text"
            )
        if progress is not None:
            progress(0, len(ids))
        stops = sorted(stops)
        done = 0
        while done < len(ids):
            here = len(self.tokens)
            ahead = next((stop - here for stop in stops if stop > here), step)
            chunk = ids[done : done + min(step, ahead)]
            self._absorb(chunk, last=done + len(chunk) == len(ids))
            done += len(chunk)
            self._checkpoint_on_the_way(stops, every)
            if progress is not None:
                progress(done, len(ids))
            mx.clear_cache()

    def _absorb(self, chunk: list[int], last: bool) -> None:
        with self._whole(len(chunk)):
            if last:
                self.logits = self._logits(mx.array(chunk))
                finite = mx.isfinite(self.logits).all()
                mx.eval(self.logits, finite, self.states())
                check_finite(finite, len(self.tokens) + len(chunk))
            else:
                self.logits = None
                # Logits that nobody evaluates cost nothing.
                self.model(mx.array([chunk]), cache=self.cache)
                mx.eval(self.states())
            self.tokens += chunk

    def _checkpoint_on_the_way(self, stops: Collection[int], every: int | None) -> None:
        here = len(self.tokens)
        nearest = self.checkpoints.nearest(here)
        since = here - (nearest.offset if nearest else 0)
        if marks.can_mark(self.cache) and (here in stops or (every and since >= every)):
            self.take(automatic=True)

    def take(self, *, automatic: bool = False) -> Checkpoint:
        """A checkpoint of this place, kept in ``checkpoints`` (an automatic one may be thinned)."""
        marks.check(self.cache)
        point = marks.settle(marks.mark(self.cache))
        checkpoint = Checkpoint(len(self.tokens), point, self.logits, automatic)
        self.checkpoints.add(checkpoint)
        return checkpoint

    def rewind(self, to: Checkpoint | int, **options: Any) -> None:
        """Go back to a checkpoint or a number of tokens, with logits to go on from.

        Between checkpoints the tokens since the nearest one before are read again; ``options`` as
        for ``prefill``. Checkpoints beyond the place are dropped. Raises UserError for a
        checkpoint that this context no longer has, and for a number beyond its tokens.
        """
        if isinstance(to, Checkpoint):
            if to not in self.checkpoints:
                raise UserError(
                    f"the checkpoint at {to.offset:,} tokens is not one of this text: it was "
                    "dropped, or the text went back before it"
                )
            to = to.offset
        if not 0 <= to <= len(self.tokens):
            raise UserError(f"cannot rewind to {to} of {len(self.tokens):,} tokens")
        ids = self.tokens[:to]
        self.reuse(ids)
        self.prefill(ids[len(self.tokens) :], **options)

    def reuse(self, ids: Sequence[int]) -> int:
        """Go back to the longest prefix of ``ids`` that needs no reading; the tokens it has.

        That is all that was absorbed, a checkpoint of it, or nothing. It is followed by
        ``prefill(ids[n:])``; where n is all of ``ids`` there are logits to go on from.
        """
        common = _common(self.tokens, ids)
        if common == len(self.tokens) and (common < len(ids) or self.logits is not None):
            return common
        usable = [
            point
            for point in self.checkpoints
            if point.offset < min(common + 1, len(ids))
            or (point.offset == len(ids) == common and point.logits is not None)
        ]
        if not usable:
            self.clear()
            return 0
        self._restore(usable[-1].mark, usable[-1].offset, usable[-1].logits)
        return len(self.tokens)

    def fork(self) -> "Context":
        """Another context that has read the same, checkpoints included; each goes its own way.

        Nothing is copied until one of the two goes on, and then the last block of latents only.
        """
        marks.check(self.cache)
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.tokens = list(self.tokens)
        other.cache = marks.clone(self.cache)
        other.checkpoints = self.checkpoints.copy()
        return other

    def _restore(self, point: marks.Mark, offset: int, logits: mx.array | None) -> None:
        marks.restore(self.cache, point)
        del self.tokens[offset:]
        self.logits = logits
        self.checkpoints.drop_after(offset)

    def decode(
        self,
        max_tokens: int,
        *,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        seed: int | None = None,
    ) -> Iterator[int]:
        """Yield up to ``max_tokens`` new tokens, each of them absorbed when it is yielded.

        ``sampler``, ``logits_processors`` and ``seed`` as in ``Sampling``.
        """
        if self.logits is None:
            raise UserError("nothing to go on from: prefill at least one token")
        if max_tokens <= 0:
            return
        if self.room is not None:
            max_tokens = min(max_tokens, self.room)
        sampling = Sampling(sampler, logits_processors, seed)
        history = History(self.tokens) if logits_processors else None
        finite = mx.isfinite(self.logits).all()
        token = sampling.draw(self.logits, history and history.before(), len(self.tokens))
        mx.async_eval(token, finite)
        for n in range(max_tokens):
            with self._whole(1):
                # The next step is on its way before this token is read.
                self.logits = self._logits(token)
                if history is not None:
                    history.extend(token)
                finite_ahead = mx.isfinite(self.logits).all()
                before = history and history.before()
                ahead = sampling.draw(self.logits, before, len(self.tokens) + 1)
                mx.async_eval(ahead, finite_ahead, self.states())
                check_finite(finite, len(self.tokens))
                self.tokens.append(token.item())
            yield self.tokens[-1]
            token, finite = ahead, finite_ahead
            if n % CLEAR_EVERY == CLEAR_EVERY - 1:
                mx.clear_cache()

    def _logits(self, tokens: mx.array) -> mx.array:
        """Absorb tokens [T]; logits [1, vocabulary] of the last one, not evaluated yet."""
        return last_logits(self.model, tokens, self.cache, self._last_only)

    def states(self) -> list[Any]:
        """Every array of the cache, to be evaluated with a step."""
        return cache_arrays(self.cache)

    @contextmanager
    def _whole(self, tokens: int) -> Iterator[None]:
        """A step of so many tokens is absorbed by every layer, or by none."""
        before = marks.mark(self.cache, tokens) if marks.can_mark(self.cache) else None
        offset, logits = len(self.tokens), self.logits
        try:
            yield
        except BaseException as error:
            if before is None or isinstance(error, NonFiniteLogits):
                self.clear()
            else:
                self._restore(before, offset, logits)
            raise


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])
