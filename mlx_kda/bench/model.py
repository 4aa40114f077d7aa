"""`mlx-kda bench model`: prefill and decode of one model, ours against mlx-lm's class.

Each model prefills as its own library drives it. Ours computes the head for the last token only;
mlx-lm evaluates its cache alone, for all tokens but the last, and takes that one as a step.
Decoding is one loop for both: greedy single tokens, each evaluated before the next.
"""

import collections
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_reduce

from ..layers import blas_layout
from ..memory_plan import machine
from ..models.hybrid import Model
from ..step import GPU_STEP
from .results import Benchmark, columns
from .subject import Subject
from .timing import interleave

BENCHMARK = Benchmark(
    "model",
    "Prefill and decode of a model against mlx-lm's class",
    columns(
        "context phase candidate ms tokens_per_second spread launches peak_mb",
        tokens_per_second="tokens/s",
        peak_mb="peak MB",
    ),
    "The same folder for all, or random weights of one shape. Prefill is each library's own, "
    "256 tokens at a time on a CPU and 2,048 on a GPU: mlx-lm leaves the head out until the "
    "last token, ours computes it for that token alone; decode is the same loop for both. On a "
    "Linux CPU the layout of weights in memory is part of the difference: our loader lays them "
    "out for its BLAS, mlx-lm's does not, and a third candidate is mlx-lm's model with our "
    "layout. Launches are nodes of this device's graph. A candidate is left out "
    "where a single prefill would take it twice the seconds allowed. A model that memory does "
    "not hold twice is measured by one library, then by the other (alone).",
)
CANDIDATES = ("ours", "mlx-lm")
# Tokens that both read at a time: where each is fastest.
_CPU_STEP, _GPU_STEP = 256, GPU_STEP

# Primitives that only describe memory in another way, on every backend.
_VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "Copy", "Depends", "ExpandDims", "Flatten",
    "Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
}  # fmt: skip


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
        chains: dict[str, Any] = {}
        peaks: dict[str, int] = {}
        for name, model in models.items():
            chains[name], peaks[name] = _started(chain, model, prompt)
        timings = interleave(chains, samples=samples, calls=decode, budget=budget, warm=True)
        for name, timing in timings.items():
            row = {
                "candidate": name,
                "phase": phase,
                "context": context,
                **timing.columns(),
                "tokens_per_second": tokens / timing.median,
                "peak_mb": peaks[name] / 1e6,
            }
            if phase == "decode":
                row["launches"] = chains[name].count_launches()
            yield row


def _started(chain: type, model: nn.Module, prompt: mx.array) -> tuple[Callable, int]:
    """A chain after one call, and bytes of the weights and of what that call allocated or keeps."""
    mx.clear_cache()
    before = mx.get_active_memory()
    run = chain(model, prompt)
    mx.reset_peak_memory()
    run(1)
    return run, _weights(model) + mx.get_peak_memory() - before


def _weights(model: nn.Module) -> int:
    return tree_reduce(lambda total, w: total + w.nbytes, model.parameters(), 0)


def _absorb(model: nn.Module, prompt: mx.array, cache: list[Any]) -> mx.array:
    """Prefill as the model's own library does; the logits of the last token."""
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


def launches(outputs: Sequence[mx.array]) -> collections.Counter:
    """Primitive -> how often evaluating ``outputs`` launches it.

    Views are not counted; a concatenation counts once an input. Reshapes that have to copy are
    not seen. Count two models under the same `as_on_metal`, or neither.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), *outputs)
        text = path.read_text()
    # A node's lines: its declaration, then an edge from each argument. Calls of one compiled
    # function share a number but not a declaration.
    counts: collections.Counter = collections.Counter()
    concatenate = None
    for declared, name, argument in re.findall(
        r'\{ (\d+) \[label ="([^"]+)", shape=rectangle\]; \}|"[^"]+" -> (\d+)', text
    ):
        if argument:
            counts["Concatenate"] += argument == concatenate
            continue
        concatenate = declared if name == "Concatenate" else None
        if name != "Concatenate" and name.split()[0] not in _VIEWS:
            counts[name] += 1
    return +counts


def state_arrays(cache: Sequence[Any]) -> list[mx.array]:
    """The arrays that a model's cache holds: what a step has to compute beside its token."""
    return [a for entry in cache for a in entry.state if isinstance(a, mx.array)]
