"""From a prompt to text: streaming pieces, stop tokens and statistics.

``stream_generate`` takes a prompt; ``decode_text`` continues a ``Context`` that has absorbed one.
"""

import resource
import sys
import time
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import prompt_lookup
from .context import Context, Progress
from .errors import UserError
from .sampling import LogitsProcessor, Sampler, Sampling


@dataclass
class Statistics:
    """The cost of a generation so far. Seconds are wall clock, memory is in bytes.

    ``prompt_tokens`` = ``reused_tokens`` (in the context before) + ``prefilled_tokens``.
    ``drafted_tokens`` were guessed by speculation and ``accepted_tokens`` of them were right.
    ``policy`` is the context's cache policy, ``cache_bytes`` the size of its cache now.
    ``peak_memory`` is MLX's own peak where it keeps one, else the process's largest resident
    size; ``peak_memory_source`` says which ("mlx" or "process").
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefilled_tokens: int = 0
    prompt_seconds: float = 0.0
    generation_tokens: int = 0
    generation_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    policy: str = "exact"
    cache_bytes: int = 0
    peak_memory: int = 0
    peak_memory_source: str = "mlx"
    finish_reason: str | None = None

    @property
    def prompt_tps(self) -> float:
        """Tokens prefilled per second."""
        return self.prefilled_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generation_tps(self) -> float:
        """Tokens generated per second."""
        return self.generation_tokens / self.generation_seconds if self.generation_seconds else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of the guessed tokens that were right, None where none was guessed."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    def measure_memory(self, context: Context) -> None:
        """Record the peak so far and the size of the context."""
        self.peak_memory, self.peak_memory_source = peak_memory()
        self.policy, self.cache_bytes = str(context.policy), context.nbytes

    def as_dict(self) -> dict[str, Any]:
        """All fields and the rates, for JSON."""
        rates = {"prompt_tps": self.prompt_tps, "generation_tps": self.generation_tps}
        return {**asdict(self), **rates, "acceptance": self.acceptance}


@dataclass(frozen=True)
class Piece:
    """One generated token and the text that it completes.

    ``text`` is empty while a character is unfinished and for control tokens. The piece of a
    stop token, like the last one before ``max_tokens``, carries the text still held back, and
    its statistics name the ``finish_reason``: "stop" or "length".
    """

    text: str
    token: int
    statistics: Statistics = field(repr=False)


def peak_memory() -> tuple[int, str]:
    """Peak memory in bytes and who measured it: "mlx", or "process" where MLX keeps none."""
    peak = mx.get_peak_memory()
    if peak:
        return peak, "mlx"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident * (1 if sys.platform == "darwin" else 1024), "process"


def control_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids that are never shown as text: the stop ids and the tokenizer's other special tokens."""
    ids = set(tokenizer.eos_token_ids)
    ids.update(getattr(tokenizer, "all_special_ids", None) or ())
    return frozenset(ids)


def decode_text(
    context: Context,
    tokenizer: Any,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    stop_ids: Sequence[int] | None = None,
    seed: int | None = None,
    speculate: bool = False,
    statistics: Statistics | None = None,
) -> Generator[Piece, None, None]:
    """Continue what ``context`` has absorbed and yield a piece for every token.

    Ends at the first token in ``stop_ids`` (by id; default: all the tokenizer's end tokens;
    an empty list stops at none) or after ``max_tokens``. ``speculate`` verifies guesses by
    ``prompt_lookup``: the same tokens, in fewer passes where the text repeats itself.
    ``statistics`` is updated on the way; each piece holds a copy.
    """
    statistics = Statistics() if statistics is None else statistics
    stops = frozenset(tokenizer.eos_token_ids if stop_ids is None else stop_ids)
    hidden = control_tokens(tokenizer) | stops
    detokenizer = tokenizer.detokenizer
    detokenizer.reset()
    if context.room is not None:
        max_tokens = min(max_tokens, context.room)
    start = time.perf_counter()
    acceptance = prompt_lookup.Acceptance()
    if speculate:
        sampling = Sampling(sampler, logits_processors, seed)
        tokens = prompt_lookup.decode(context, max_tokens, sampling, acceptance)
    else:
        tokens = context.decode(
            max_tokens, sampler=sampler, logits_processors=logits_processors, seed=seed
        )
    with closing(tokens):  # an error here must not leave it open, and the context with it
        for token in tokens:
            if token not in hidden:
                detokenizer.add_token(token)
            statistics.generation_tokens += 1
            if token in stops:
                statistics.finish_reason = "stop"
            elif statistics.generation_tokens >= max_tokens:
                statistics.finish_reason = "length"
            if statistics.finish_reason is not None:
                detokenizer.finalize()
            statistics.generation_seconds = time.perf_counter() - start
            statistics.drafted_tokens = acceptance.drafted
            statistics.accepted_tokens = acceptance.accepted
            statistics.measure_memory(context)
            yield Piece(detokenizer.last_segment, token, replace(statistics))
            if statistics.finish_reason is not None:
                return
    statistics.finish_reason = "length"
    statistics.measure_memory(context)


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    prefill_step: int | None = None,
    context: Context | None = None,
    stop_ids: Sequence[int] | None = None,
    seed: int | None = None,
    speculate: bool = False,
    progress: Progress | None = None,
    stops: Collection[int] = (),
    every: int | None = None,
    statistics: Statistics | None = None,
) -> Generator[Piece, None, None]:
    """Prefill ``prompt`` and yield what the model generates, piece by piece.

    A string is encoded by the tokenizer as it is, without a chat template. With a
    ``context`` the prompt continues what that has absorbed. Raises UserError for an empty
    prompt, a negative ``max_tokens`` and a prompt longer than the model's context at once,
    and NonFiniteLogits from the iterator. See ``Context.prefill`` for ``stops`` and ``every``, and
    ``Context`` for what the cache holds when the iterator is closed early.
    """
    context = Context(model) if context is None else context
    statistics = Statistics() if statistics is None else statistics
    ids = encode_prompt(tokenizer, prompt)
    if not ids and context.logits is None:
        raise UserError("the prompt is empty: give at least one token")
    if max_tokens < 0:
        raise UserError(f"max_tokens must be 0 or more, not {max_tokens}")
    if context.room is not None and len(ids) > context.room:
        raise UserError(
            f"the prompt of {len(context.tokens) + len(ids):,} tokens is longer than the "
            f"model's context of {context.limit:,}: shorten it"
        )
    statistics.reused_tokens = len(context.tokens)
    statistics.prompt_tokens = statistics.reused_tokens + len(ids)

    def pieces() -> Generator[Piece, None, None]:
        start = time.perf_counter()
        try:
            context.prefill(ids, step=prefill_step, progress=progress, stops=stops, every=every)
        finally:  # an interrupted prefill counts as well
            statistics.prefilled_tokens = max(len(context.tokens) - statistics.reused_tokens, 0)
            statistics.prompt_seconds = time.perf_counter() - start
            statistics.measure_memory(context)
        yield from decode_text(
            context,
            tokenizer,
            max_tokens=max_tokens,
            sampler=sampler,
            logits_processors=logits_processors,
            stop_ids=stop_ids,
            seed=seed,
            speculate=speculate,
            statistics=statistics,
        )

    return pieces()


def encode_prompt(tokenizer: Any, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """Token ids of a prompt given as text, as ids, or as an array [T] or [1, T].

    Raises UserError for anything else, such as a batch.
    """
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    array: Any = prompt if hasattr(prompt, "shape") else None  # MLX's, numpy's or another's
    if array is not None:
        if array.ndim != 1 and (array.ndim != 2 or len(array) != 1):
            raise UserError(f"a prompt is one sequence: ids [T] or [1, T], not {list(array.shape)}")
        return array.reshape(-1).tolist()
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
        raise UserError(f"a prompt must be text or token ids, not {type(prompt).__name__}")
    return [*prompt]
