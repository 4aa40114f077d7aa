"""What a model has read: its cache and the ids absorbed into it, kept in step."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_kda.errors import UserError

PREFILL_STEP = 2048
# Every so many decoded tokens MLX's cache of free buffers is emptied, so that buffers of
# lengths that will not come again (attention over a growing cache) do not pile up.
CLEAR_EVERY = 256

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
Progress = Callable[[int, int], None]


class NonFiniteLogits(UserError):
    """The model's logits hold NaN or infinity: the weights or the state are spoilt."""


def context_limit(model: nn.Module) -> int | None:
    """Longest context in tokens that the model's config allows, None where it names none."""
    config = getattr(model, "args", None) or getattr(model, "config", None)
    for name in ("model_max_length", "max_position_embeddings"):
        limit = getattr(config, name, None)
        if limit:
            return int(limit)
    return None


class Context:
    """What a model has read: its cache, and the ids absorbed into it.

    ``tokens`` and the cache never disagree. A token that ``decode`` has yielded is absorbed,
    a stop token too, because decoding runs one step ahead: closing the iterator early leaves
    the cache as if exactly ``tokens`` had been prefilled. A recurrent state cannot be taken
    back, so an error or a KeyboardInterrupt in the middle of a step empties the context.
    """

    def __init__(self, model: nn.Module, make_cache: Callable[[], list[Any]] | None = None):
        """An empty context; ``make_cache`` gives its cache, the model's own by default."""
        self.model = model
        self._make_cache = make_cache or model.make_cache
        self.limit = context_limit(model)
        self._last_only = "last_only" in inspect.signature(type(model).__call__).parameters
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.tokens: list[int] = []
        self.logits: mx.array | None = None  # [1, vocabulary], of the last token absorbed
        self.cache = self._make_cache()

    @property
    def room(self) -> int | None:
        """Tokens that still fit the model's context, None without a limit."""
        return None if self.limit is None else max(self.limit - len(self.tokens), 0)

    def prefill(
        self, ids: Sequence[int], *, step: int = PREFILL_STEP, progress: Progress | None = None
    ) -> None:
        """Absorb ``ids`` in chunks of at most ``step`` tokens.

        ``progress(done, total)`` is called at the start and after every chunk. What it raises
        ends the prefill between two chunks, with ``tokens`` telling how far it came.

        Raises UserError where the model's context is too short, and NonFiniteLogits.
        """
        ids = list(ids)
        if step < 1:
            raise UserError(f"the prefill step must be at least 1 token, not {step}")
        if self.room is not None and len(ids) > self.room:
            raise UserError(
                f"{len(self.tokens) + len(ids):,} tokens do not fit the model's context of "
                f"{self.limit:,}: shorten the text"
            )
        if progress is not None:
            progress(0, len(ids))
        for start in range(0, len(ids), step):
            chunk = ids[start : start + step]
            with self._whole():
                if start + len(chunk) < len(ids):
                    self.logits = None
                    # Logits that nobody evaluates cost nothing.
                    self.model(mx.array([chunk]), cache=self.cache)
                    mx.eval(self._states())
                else:
                    self.logits = self._last_logits(mx.array(chunk))
                    finite = mx.isfinite(self.logits).all()
                    mx.eval(self.logits, finite, self._states())
                    _check_finite(finite, len(self.tokens) + len(chunk))
                self.tokens += chunk
            if progress is not None:
                progress(start + len(chunk), len(ids))
            mx.clear_cache()

    def decode(
        self,
        max_tokens: int,
        *,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        seed: int | None = None,
    ) -> Iterator[int]:
        """Yield up to ``max_tokens`` new tokens, each of them absorbed when it is yielded.

        ``sampler`` takes log-probabilities [1, vocabulary] in float32 and gives a token [1];
        the default takes the most likely. With ``seed`` the draw of a token depends on the
        seed and its position only, so that stopping and going on changes nothing.
        """
        if self.logits is None:
            raise UserError("nothing to go on from: prefill at least one token")
        if max_tokens <= 0:
            return
        if self.room is not None:
            max_tokens = min(max_tokens, self.room)
        sampler = sampler or _greedy
        history = mx.array(self.tokens) if logits_processors else None

        def sample(position: int) -> mx.array:
            logits = self.logits
            for processor in logits_processors:
                logits = processor(history, logits)
            logits = logits.astype(mx.float32)
            if seed is not None:
                mx.random.seed(_mix(seed, position))
            return sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

        finite = mx.isfinite(self.logits).all()
        token = sample(len(self.tokens))
        mx.async_eval(token, finite)
        for n in range(max_tokens):
            with self._whole():
                # The next step is on its way before this token is read.
                self.logits = self._last_logits(token)
                if history is not None:
                    history = mx.concatenate([history, token])
                finite_ahead = mx.isfinite(self.logits).all()
                ahead = sample(len(self.tokens) + 1)
                mx.async_eval(ahead, finite_ahead, self._states())
                _check_finite(finite, len(self.tokens))
                self.tokens.append(token.item())
            yield self.tokens[-1]
            token, finite = ahead, finite_ahead
            if n % CLEAR_EVERY == CLEAR_EVERY - 1:
                mx.clear_cache()

    def _last_logits(self, tokens: mx.array) -> mx.array:
        """Absorb tokens [T]; logits [1, vocabulary] of the last row, not evaluated yet."""
        if self._last_only:
            return self.model(tokens[None], cache=self.cache, last_only=True)[:, -1, :]
        if tokens.size > 1:
            # mlx-lm's own models give logits of every row: gigabytes for a long chunk.
            self.model(tokens[None, :-1], cache=self.cache)
        return self.model(tokens[None, -1:], cache=self.cache)[:, -1, :]

    def _states(self) -> list[Any]:
        # All of them, every step: a lazy counter left behind is a graph that never ends.
        return [layer.state for layer in self.cache if not layer.empty()]

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A step is absorbed by every layer or the context is emptied."""
        try:
            yield
        except BaseException:
            self.clear()
            raise


def _greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def _mix(seed: int, position: int) -> int:
    # An odd multiplier keeps (seed, position) pairs apart: seed 1 is not seed 0 shifted.
    return (seed * 0x9E3779B97F4A7C15 + position) % 2**64


def _check_finite(finite: mx.array, position: int) -> None:
    if not finite.item():
        raise NonFiniteLogits(
            f"the model's logits are not finite after {position:,} tokens: the weights are "
            "damaged or do not suit this dtype (convert again, with --dtype float32 to tell)"
        )
