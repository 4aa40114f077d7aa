"""`bench model`: prefill and decode of one model, ours against mlx-lm's model class.

Each model prefills as its own library drives it. Ours computes the head for the last token only;
mlx-lm evaluates its cache alone, for all tokens but the last, and takes that one as a step.
Decoding is one loop for both: greedy single tokens, each evaluated before the next.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..layers import blas_layout
from ..plan import machine
from ..step import GPU_STEP
from .graph import launches, state_arrays
from .subject import Subject
from .timing import interleave

CANDIDATES = ("ours", "mlx-lm")
# Tokens that both read at a time: where each is fastest.
_CPU_STEP, _GPU_STEP = 256, GPU_STEP


def of(
    subject: Subject, candidates: Sequence[str] = CANDIDATES, **options: Any
) -> Iterator[dict[str, Any]]:
    """`run` for our model of a subject and mlx-lm's, or one of them alone.

    Where memory does not hold both, each is measured by itself, and its rows say "(alone)".
    Where our loader lays a folder's weights out for the CPU's BLAS, mlx-lm's model with the same
    layout is a candidate of its own. Raises UserError as `Subject` does.
    """
    subject.prepare(stock="mlx-lm" in candidates)
    makers = {"ours": subject.ours, "mlx-lm": subject.stock}
    first, *rest = (name for name in makers if name in candidates)
    models = {first: makers[first]()}
    layout = subject.folder is not None and blas_layout.applies() and "ours" in models
    third = bool(rest) and layout and models["ours"].model.dtype == mx.float32
    if (1 + len(rest) + third) * _weights(models[first]) > machine().usable:
        yield from _alone(models, options)
        for name in rest:
            models.clear()
            mx.clear_cache()
            models[name] = makers[name]()
            yield from _alone(models, options)
        return
    models |= {name: makers[name]() for name in rest}
    if third:
        models["mlx-lm, our layout of weights"] = subject.stock()
        blas_layout.lay_out(models["mlx-lm, our layout of weights"])
    yield from run(models, **options)


def _alone(models: dict[str, nn.Module], options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in run(models, **options):
        yield {**row, "candidate": f"{row['candidate']} (alone)"}


def run(
    models: dict[str, nn.Module],
    contexts: list[int],
    *,
    decode: int = 20,
    samples: int = 5,
    budget: float = 60.0,
) -> Iterator[dict[str, Any]]:
    """One row for each (context, phase, candidate), as they come.

    A candidate is left out where a single prefill would take it twice the ``budget``, by its speed
    at the context before. Peak memory is that of a candidate's weights and what it allocates.
    """
    vocab = next(iter(models.values())).args.vocab_size
    for i, context in enumerate(contexts):
        prompt = mx.array(np.random.default_rng(0).integers(0, vocab, (1, context), dtype=np.int32))
        mx.eval(prompt)
        speeds = {}
        for row in _both_phases(models, prompt, decode, samples, budget):
            if row["phase"] == "prefill":
                speeds[row["candidate"]] = row["tokens_per_second"]
            yield row
        following = contexts[i + 1] if i + 1 < len(contexts) else 0
        models = {n: m for n, m in models.items() if following <= 2 * budget * speeds[n]}
        if not models:
            return


def _both_phases(
    models: dict[str, nn.Module], prompt: mx.array, decode: int, samples: int, budget: float
) -> Iterator[dict[str, Any]]:
    context = prompt.size
    for phase, chain, tokens in (("prefill", _Prefills, context), ("decode", _Decodes, 1)):
        chains, peaks = {}, {}
        for name, model in models.items():
            chains[name], peaks[name] = _started(chain, model, prompt)
        timings = interleave(chains, samples=samples, calls=decode, budget=budget, warm=True)
        for name, timing in timings.items():
            row = {
                "candidate": name,
                "phase": phase,
                "context": context,
                "ms": timing.median * 1e3,
                "tokens_per_second": tokens / timing.median,
                "spread": timing.spread,
                "steady": timing.steady,
                "samples": timing.samples,
                "calls": timing.calls,
                "peak_mb": peaks[name] / 1e6,
            }
            if phase == "decode":
                row["launches"] = chains[name].count_launches()
            yield row


def _started(chain: type, model: nn.Module, prompt: mx.array) -> tuple[Callable, int]:
    """A chain after one call, and bytes of the weights and of what that call allocates or holds."""
    mx.clear_cache()
    before = mx.get_active_memory()
    run = chain(model, prompt)
    mx.reset_peak_memory()
    run(1)
    return run, _weights(model) + mx.get_peak_memory() - before


def _weights(model: nn.Module) -> int:
    return sum(w.nbytes for _, w in tree_flatten(model.parameters()))


def _absorb(model: nn.Module, prompt: mx.array, cache: list[Any]) -> mx.array:
    """Prefill as the model's own library does; the last row's logits."""
    from ..models.hybrid import Model

    ours = isinstance(model, Model)
    length = prompt.shape[1]
    whole = length if ours else length - 1
    step = _CPU_STEP if mx.default_device() == mx.cpu else _GPU_STEP
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        last = {"last_only": True} if ours else {}
        logits = model(prompt[:, start:stop], cache=cache, **last)
        mx.eval(state_arrays(cache), *([logits] if stop == length else []))
    if not ours:
        logits = model(prompt[:, whole:], cache=cache)
        mx.eval(state_arrays(cache), logits)
    return logits[:, -1]


class _Prefills:
    """Prefills of one prompt, each from nothing."""

    def __init__(self, model: nn.Module, prompt: mx.array):
        self.model, self.prompt = model, prompt

    def __call__(self, calls: int) -> None:
        for _ in range(calls):
            _absorb(self.model, self.prompt, self.model.make_cache())


class _Decodes:
    """Steps of greedy decoding after a prompt, each evaluated before the next."""

    def __init__(self, model: nn.Module, prompt: mx.array):
        self.model, self.cache = model, model.make_cache()
        self.token = mx.argmax(_absorb(model, prompt, self.cache), axis=-1)[:, None]

    def __call__(self, calls: int) -> None:
        for _ in range(calls):
            self.token = self._next()
            mx.eval(self.token, state_arrays(self.cache))

    def _next(self) -> mx.array:
        return mx.argmax(self.model(self.token, cache=self.cache)[:, -1], axis=-1)[:, None]

    def count_launches(self) -> int:
        """Nodes of the graph of the next step."""
        token = self._next()
        return launches([token, *state_arrays(self.cache)]).total()
