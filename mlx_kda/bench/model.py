"""`bench model`: prefill and decode of one MLX folder, ours against mlx-lm's model class."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .graph import launches
from .timing import interleave

_PREFILL_STEP = 2048


def run(
    folder: Path,
    contexts: list[int],
    *,
    decode: int = 20,
    samples: int = 5,
    budget: float = 60.0,
) -> Iterator[dict[str, Any]]:
    """One row for each (context, phase, candidate), as they come.

    Both models are driven by the same loop: prompts in pieces of 2,048 tokens with the last row's
    logits taken, then greedy single tokens, each evaluated before the next.
    """
    models = {"ours": _ours(folder), "mlx-lm": _theirs(folder)}
    vocab = models["ours"].args.vocab_size
    for context in contexts:
        prompt = mx.array(np.random.default_rng(0).integers(0, vocab, (1, context)))
        mx.eval(prompt)
        for phase, chains, tokens in (
            ("prefill", {n: _prefill_chain(m, prompt) for n, m in models.items()}, context),
            ("decode", {n: _decode_chain(m, prompt) for n, m in models.items()}, 1),
        ):
            timings = interleave(chains, samples=samples, calls=decode, budget=budget)
            for name, timing in timings.items():
                yield {
                    "candidate": name,
                    "phase": phase,
                    "context": context,
                    "ms": timing.median * 1e3,
                    "tokens_per_second": tokens / timing.median,
                    "spread": timing.spread,
                    "steady": timing.steady,
                    "samples": timing.samples,
                    "calls": timing.calls,
                    **(_step(models[name], prompt) if phase == "decode" else {}),
                }


def _ours(folder: Path):
    from ..models import load_model

    return load_model(folder)


def _theirs(folder: Path):
    from mlx_lm.utils import load_model

    return load_model(folder)[0]


def _absorb(model: Any, prompt: mx.array, cache: list[Any]) -> mx.array:
    """Prefill; the last row's logits."""
    for start in range(0, prompt.shape[1], _PREFILL_STEP):
        logits = model(prompt[:, start : start + _PREFILL_STEP], cache=cache)[:, -1]
        mx.eval(logits, [c.state for c in cache])
    return logits


def _prefill_chain(model: Any, prompt: mx.array):
    def run(calls: int) -> None:
        for _ in range(calls):
            _absorb(model, prompt, model.make_cache())

    return run


def _decode_chain(model: Any, prompt: mx.array):
    cache = model.make_cache()
    token = mx.argmax(_absorb(model, prompt, cache), axis=-1)[:, None]

    def run(calls: int) -> None:
        nonlocal token
        for _ in range(calls):
            token = mx.argmax(model(token, cache=cache)[:, -1], axis=-1)[:, None]
            mx.eval(token, [c.state for c in cache])

    return run


def _step(model: Any, prompt: mx.array) -> dict[str, Any]:
    """Launches and peak memory of one decode step."""
    cache = model.make_cache()
    token = mx.argmax(_absorb(model, prompt, cache), axis=-1)[:, None]
    mx.eval(token)
    mx.reset_peak_memory()
    logits = model(token, cache=cache)
    counts = launches([logits, *_arrays(cache)])
    mx.eval(logits, [c.state for c in cache])
    return {"launches": counts.total(), "peak_mb": mx.get_peak_memory() / 1e6}


def _arrays(cache: list[Any]) -> list[mx.array]:
    return [a for c in cache for a in c.state if isinstance(a, mx.array)]
