"""One entrance to every path, which says what it chose and why."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from .chunked import kda_chunk_ref
from .problem import Problem
from .reference import kda_ref
from .stepwise import kda_step

# Measured on the CPU build: below this many tokens a chunk costs more than its tokens one by one.
_CHUNK_FROM = 16
# State elements (8 heads of 128 x 128) up to which a single token is quickest in the plain form.
_SMALL_STATE = 8 * 128 * 128

_PATHS: dict[str, Callable] = {
    "reference": kda_ref,
    "step": kda_step,
    "chunk": kda_chunk_ref,
}
PATHS = ("auto", *_PATHS)


@dataclass(frozen=True)
class Choice:
    """What the dispatcher runs for a call, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def kda(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array | None,
    beta: mx.array,
    *,
    scale: float | None = None,
    state: mx.array | None = None,
    lengths: mx.array | None = None,
    erase: bool = True,
    path: str = "auto",
) -> tuple[mx.array, mx.array]:
    """Kimi Delta Attention and its lineage, by the fastest path that fits.

    Computes what `kda_ref` documents; `explain` tells which path a call takes.

    Args:
        q, k: [B, T, H, Dk] float32, float16 or bfloat16.
        v: [B, T, Hv, Dv], Hv a multiple of H.
        g: natural-log decay, float32: [B, T, Hv, Dk] (KDA), [B, T, Hv] (Gated DeltaNet), or None
            (DeltaNet).
        beta: [B, T, Hv], write strength, in (0, 1) or (0, 2).
        scale: factor on q, Dk**-0.5 unless given.
        state: [B, Hv, Dv, Dk] float32; zeros unless given.
        lengths: [B] integers; tokens at and past a row's length change nothing and output 0.
        erase: False leaves the delta rule out: (gated) linear attention.
        path: "auto", "reference", "step" or "chunk".

    Returns:
        (o, state): [B, T, Hv, Dv] in v's dtype, [B, Hv, Dv, Dk] float32. All paths are
        differentiable.

    Raises:
        ValueError: a shape, dtype or path that does not fit, named.
    """
    options = {"scale": scale, "state": state, "lengths": lengths, "erase": erase}
    choice = explain(q, k, v, g, beta, path=path, **options)
    return _PATHS[choice.path](q, k, v, g, beta, **options)


def explain(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array | None,
    beta: mx.array,
    *,
    scale: float | None = None,
    state: mx.array | None = None,
    lengths: mx.array | None = None,
    erase: bool = True,
    path: str = "auto",
) -> Choice:
    """The path that `kda` takes for these arguments, and the reason; nothing is computed.

    Raises:
        ValueError: a shape, dtype or path that does not fit, named.
    """
    p = Problem.read(q, k, v, g, beta, scale, state, lengths, erase)
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, got {path!r}")
    if path != "auto":
        return Choice(path, "asked for by the caller")
    if p.T >= _CHUNK_FROM:
        return Choice("chunk", f"{p.T} tokens fill chunks: matrix products instead of a loop")
    if p.T <= 1 and p.B * p.Hv * p.Dk * p.Dv <= _SMALL_STATE:
        return Choice("reference", "one token on a small state: fewest operations")
    return Choice("step", f"{p.T} tokens, fewer than {_CHUNK_FROM}: the state is read once a token")
