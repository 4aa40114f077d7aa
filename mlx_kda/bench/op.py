"""`mlx-kda bench op`: the op's paths and mlx-lm's op on the same arrays, with times and errors."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import gated_delta

from ..attention import explain, kda
from ..ops import reference64
from .results import Benchmark, columns
from .timing import interleave

BENCHMARK = Benchmark(
    "op",
    "The op's paths against mlx-lm's, with the error beside the time",
    columns("H T candidate path ms us_per_token spread calls error", us_per_token="us per token"),
    "Inputs are random unless `--row` names another kind; every call starts from the state that "
    "the one before left. Spread is the distance between the quartiles over the median; error is "
    "that of the output against float64.",
)
# The float64 reference is a slow loop: errors are taken over this many heads and tokens at most.
_REFERENCE_HEADS = 2
_REFERENCE_TOKENS = 2048


def run(
    tokens: list[int],
    heads: list[int],
    *,
    dim: int = 128,
    batch: int = 1,
    dtype: str = "float32",
    row: str = "random",
    paths: list[str] | None = None,
    samples: int = 7,
    budget: float = 20.0,
) -> Iterator[dict[str, Any]]:
    """Yield one row for each (heads, tokens, candidate).

    Candidates are our ``paths`` and mlx-lm's op: its Metal kernel on a Mac, its loop elsewhere.
    Every call starts from the state that the one before left.
    """
    for H in heads:
        for T in tokens:
            yield from _compare(T, H, dim, batch, dtype, row, paths, samples, budget)


def _compare(T, H, dim, batch, dtype, row, paths, samples, budget) -> Iterator[dict[str, Any]]:
    x = reference64.make(row, T=T, B=batch, H=H, Dk=dim, Dv=dim).with_state()
    kind = getattr(mx, dtype)
    q, k, v, beta = (mx.array(a).astype(kind) for a in (x.q, x.k, x.v, x.beta))
    assert x.g is not None and x.state is not None
    g, state = mx.array(x.g), mx.array(x.state)
    mx.eval(q, k, v, g, beta, state)
    truth = _truth((q, k, v, g, beta), x.state)

    calls: dict[str, Callable] = {}
    for path in paths or ["auto"]:
        calls[f"ours ({path})"] = lambda S, path=path: kda(q, k, v, g, beta, state=S, path=path)
    calls["mlx-lm"] = _mlx_lm(q, k, v, g, beta, dim)
    chosen = explain(q, k, v, g, beta, state=state)
    chains = {name: _chain(call, state) for name, call in calls.items()}
    for name, timing in interleave(chains, samples=samples, budget=budget).items():
        o, _ = calls[name](state)
        yield {
            "candidate": name,
            "path": chosen.path if "auto" in name else "",
            "row": row,
            "B": batch,
            "H": H,
            "T": T,
            "D": dim,
            "dtype": dtype,
            **timing.columns(),
            "us_per_token": timing.median * 1e6 / (T * batch),
            "error": _error(o, truth),
        }


def _chain(call: Callable, state: mx.array) -> Callable[[int], None]:
    def run(calls: int) -> None:
        S = state
        for _ in range(calls):
            o, S = call(S)
            mx.eval(o, S)

    return run


def _mlx_lm(q, k, v, g, beta, dim) -> Callable:
    """mlx-lm's op on the same gate: its loop, or its kernel where it has one."""
    scaled = q * dim**-0.5
    decay = mx.exp(g)
    mx.eval(scaled, decay)
    if mx.metal.is_available() and mx.default_device() != mx.cpu:
        return lambda S: gated_delta.gated_delta_kernel(scaled, k, v, decay, beta, S)
    return lambda S: gated_delta.gated_delta_ops(scaled, k, v, decay, beta, S)


def _truth(inputs: tuple[mx.array, ...], state: np.ndarray) -> np.ndarray:
    heads, tokens = slice(0, _REFERENCE_HEADS), slice(0, _REFERENCE_TOKENS)
    q, k, v, g, beta = (np.array(a[:, tokens, heads].astype(mx.float32)) for a in inputs)
    return reference64.recurrence(q, k, v, g, beta, state=state[:, heads])[0]


def _error(o: mx.array, truth: np.ndarray) -> float:
    T, H = truth.shape[1:3]
    return reference64.error(np.array(o[:, :T, :H].astype(mx.float32)), truth)
