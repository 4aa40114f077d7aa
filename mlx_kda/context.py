"""What a model has read: its cache and the ids absorbed into it, which always agree."""

import copy
import inspect
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .cache import Policy, checkpoints
from .cache.checkpoints import Checkpoint, Checkpoints, Snapshot
from .cache.latent_cache import cache_maker
from .errors import UserError
from .sampling import LogitsProcessor, Sampler, Sampling, TokenBuffer
from .step import NonFiniteLogits, check_finite, checked_ids, prefill_step

# Every so many decoded tokens MLX's cache of free buffers is emptied, so that buffers of
# lengths that will not come again (attention over a growing cache) do not pile up.
CLEAR_EVERY = 256

Progress = Callable[[int, int], None]


class Context:
    """What a model has read: its cache, the ids absorbed into it, and checkpoints of both.

    ``tokens`` and the cache always agree. A token that ``decode`` has yielded is absorbed,
    a stop token too, because decoding runs one step ahead: closing the iterator early leaves
    the cache as if exactly ``tokens`` had been prefilled. An error or a KeyboardInterrupt in the
    middle of a step undoes that step; logits that are not finite empty the context.

    A recurrent state cannot be trimmed, so going back means restoring a checkpoint: ``take`` one,
    ``rewind`` to any length, and ``reuse`` the prefix that a new sequence shares with this one.
    """

    def __init__(
        self,
        model: nn.Module,
        make_cache: Callable[[], list[Any]] | None = None,
        *,
        policy: str | Policy = "exact",
    ):
        """An empty context; ``make_cache`` replaces the policy's own cache.

        Raises UserError for a policy that does not exist or does not suit the model.
        """
        self.model = model
        self.policy = Policy.parse(policy)
        self._make_cache = make_cache or cache_maker(model, self.policy)
        self.limit = _context_limit(model)
        self.checkpoints = Checkpoints()
        # Our models compute the last row of logits alone where asked to.
        last_only = "last_only" in inspect.signature(type(model).__call__).parameters
        self._last_only = {"last_only": True} if last_only else {}
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.tokens: list[int] = []
        self.logits: mx.array | None = None  # [1, vocabulary], of the last token absorbed
        self.cache = self._make_cache()
        self.checkpoints.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the cache now, spare room included; checkpoints not included."""
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
        done, total = 0, len(ids)
        if self.room is not None and total > self.room:
            raise UserError(
                f"{len(self.tokens) + total:,} tokens do not fit the model's context of "
                f"{self.limit:,}: shorten the text"
            )
        if progress is not None:
            progress(0, total)
        while done < total:
            here = len(self.tokens)
            ahead = min((stop - here for stop in stops if stop > here), default=step)
            chunk = ids[done : done + min(step, ahead)]
            done += len(chunk)
            self._absorb(chunk, last=done == total)
            self._take_if_due(stops, every)
            if progress is not None:
                progress(done, total)
            mx.clear_cache()

    def _absorb(self, chunk: list[int], last: bool) -> None:
        with self._whole(len(chunk)):
            self.logits = None
            if not last or (len(chunk) > 1 and not self._last_only):
                # Logits that are never evaluated cost nothing. mlx-lm's own models give those of
                # every row, gigabytes for a long chunk, so that they get the last token apart.
                unread = chunk if not last else chunk[:-1]
                self.model(mx.array([unread]), cache=self.cache)
            if last:
                rest = chunk if self._last_only else chunk[-1:]
                logits = self.model(mx.array([rest]), cache=self.cache, **self._last_only)
                self.logits = logits[:, -1, :]
                finite = mx.isfinite(self.logits).all()
                mx.eval(self.logits, finite, self.states())
                check_finite(finite, len(self.tokens) + len(chunk))
            else:
                mx.eval(self.states())
            self.tokens += chunk

    def _take_if_due(self, stops: Collection[int], every: int | None) -> None:
        here = len(self.tokens)
        nearest = self.checkpoints.nearest(here)
        since = here - (nearest.offset if nearest else 0)
        if here in stops or (every and since >= every):
            self.take_automatic()

    def take(self) -> Checkpoint:
        """A checkpoint of the present state, kept in ``checkpoints`` until it is dropped."""
        checkpoints.check_supported(self.cache)
        return self._take(automatic=False)

    def take_automatic(self) -> None:
        """Keep a checkpoint that may be thinned, where the cache supports checkpoints."""
        if checkpoints.supported(self.cache):
            self._take(automatic=True)

    def _take(self, automatic: bool) -> Checkpoint:
        point = checkpoints.detach(checkpoints.snapshot(self.cache))
        return self.checkpoints.add(len(self.tokens), point, self.logits, automatic)

    def rewind(self, to: Checkpoint | int, **options: Any) -> None:
        """Go back to a checkpoint or a number of tokens, ready to decode from there.

        Between checkpoints the tokens since the nearest one before are read again; ``options`` as
        for ``prefill``. Checkpoints beyond that position are dropped. Raises UserError for a
        checkpoint that this context no longer has, and for a number beyond its tokens.
        """
        if isinstance(to, Checkpoint):
            if to not in self.checkpoints:
                raise UserError(
                    f"the checkpoint at {to.offset:,} tokens is not valid here: it was dropped, or "
                    "the context was rewound to before it"
                )
            to = to.offset
        if not 0 <= to <= len(self.tokens):
            raise UserError(f"cannot rewind to {to} of {len(self.tokens):,} tokens")
        ids = self.tokens[:to]
        self.reuse(ids)
        self.prefill(ids[len(self.tokens) :], **options)

    def reuse(self, ids: Sequence[int]) -> int:
        """Go back to the longest prefix of ``ids`` that need not be read again; its length n.

        That is all that was absorbed, a checkpoint of it, or nothing. To be followed by
        ``prefill(ids[n:])``; where n is all of ``ids`` the context is ready to decode.
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
        self._restore(usable[-1].snapshot, usable[-1].offset, usable[-1].logits)
        return len(self.tokens)

    def fork(self) -> "Context":
        """An independent context that has read the same, checkpoints included.

        Nothing is copied until one of the two continues, and then the last block of latents only.
        """
        checkpoints.check_supported(self.cache)
        other = copy.copy(self)
        other.tokens = list(self.tokens)
        other.cache = checkpoints.copy(self.cache)
        other.checkpoints = self.checkpoints.copy()
        return other

    def _restore(self, point: Snapshot, offset: int, logits: mx.array | None) -> None:
        checkpoints.restore(self.cache, point)
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
    ) -> Generator[int, None, None]:
        """Yield up to ``max_tokens`` new tokens, each of them absorbed when it is yielded.

        ``sampler``, ``logits_processors`` and ``seed`` as in ``Sampling``.
        """
        if self.logits is None:
            raise UserError("nothing to continue from: prefill at least one token")
        if max_tokens <= 0:
            return
        if self.room is not None:
            max_tokens = min(max_tokens, self.room)
        sampling = Sampling(sampler, logits_processors, seed)
        buffer = TokenBuffer(self.tokens) if logits_processors else None
        finite = mx.isfinite(self.logits).all()
        token = sampling.draw(self.logits, len(self.tokens), buffer)
        mx.async_eval(token, finite)
        for n in range(max_tokens):
            with self._whole(1):
                # The next step is on its way before this token is read.
                logits = self.model(token[None], cache=self.cache, **self._last_only)[:, -1, :]
                if buffer is not None:
                    buffer.extend(token)
                finite_ahead = mx.isfinite(logits).all()
                ahead = sampling.draw(logits, len(self.tokens) + 1, buffer)
                self.logits = logits
                mx.async_eval(ahead, finite_ahead, self.states())
                check_finite(finite, len(self.tokens))
                self.tokens.append(cast(int, token.item()))
            yield self.tokens[-1]
            token, finite = ahead, finite_ahead
            if n % CLEAR_EVERY == CLEAR_EVERY - 1:
                mx.clear_cache()

    def states(self) -> list[Any]:
        """Every array of the cache, to be evaluated with a step."""
        # All of them, every step: a lazy counter left behind is a graph that never ends.
        return [entry.state for entry in self.cache if not entry.empty()]

    @contextmanager
    def _whole(self, tokens: int) -> Iterator[None]:
        """A step of so many tokens is absorbed by every layer, or by none."""
        supported = checkpoints.supported(self.cache)
        before = checkpoints.snapshot(self.cache, tokens) if supported else None
        offset, logits = len(self.tokens), self.logits
        try:
            yield
        except BaseException as error:
            if before is None or isinstance(error, NonFiniteLogits):
                self.clear()
            else:
                self._restore(before, offset, logits)
            raise


def _context_limit(model: nn.Module) -> int | None:
    """Longest context in tokens that the model's config allows, None where it names none."""
    config = getattr(model, "args", None) or getattr(model, "config", None)
    for name in ("model_max_length", "max_position_embeddings"):
        if limit := getattr(config, name, None):
            return int(limit)
    return None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])
