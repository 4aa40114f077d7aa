"""The chunkwise form of the recurrence: matrix products and one small triangular solve a chunk.

For a chunk of C tokens that starts from state S, with P_i the product of the decays up to token i
and r_ij the product of those after j up to i (per channel)::

    K~_i = k_i P_i     Q~_i = scale q_i P_i     K^_j = k_j r_Cj
    N_ij = sum_d k_i k_j r_ij  (i > j)          M_ij = sum_d scale q_i k_j r_ij  (i >= j)
    U  = (I + diag(beta) N)^-1 diag(beta) (V - K~ S^T)       the errors that get written
    O  = Q~ S^T + M U
    S' = S P_C + U^T K^

Two rules keep it as accurate as the loop, whatever the gates and keys:

1. Every decay is a product of numbers <= 1, never a quotient: exp(-G) overflows for gates that
   real models produce.
2. The inverse comes from forward substitution on 8 x 8 blocks and block merging, in float32. A
   Neumann series loses every digit when keys repeat and beta is near 1.

Both come out of one construction: a span of tokens is either a block of eight, or two half spans
merged (`_merge`).
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from .elementwise import exp
from .problem import Problem

CHUNKS = (8, 16, 32, 64)
_BLOCK = 8
# Arrays of a segment stay about this small, so that they are computed from cache, not memory.
_SEGMENT_BYTES = 2 << 20


def kda_chunk_ref(
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
    chunk: int = 16,
) -> tuple[mx.array, mx.array]:
    """What `kda_ref` computes, chunk by chunk (equations above), float32 inside.

    Arguments and results are those of `kda_ref`.

    Args:
        chunk: tokens a chunk: 8, 16, 32 or 64. Any T works; the tail is padded with tokens that
            change nothing.

    Raises:
        ValueError: a shape, dtype or chunk size that does not fit, named.
    """
    p = Problem.read(q, k, v, g, beta, scale, state, lengths, erase)
    if chunk not in CHUNKS:
        raise ValueError(f"chunk must be one of {CHUNKS}, got {chunk}")
    return run(p, q, k, v, g, beta, state, lengths, chunk)


def run(
    p: Problem,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array | None,
    beta: mx.array,
    state: mx.array | None,
    lengths: mx.array | None,
    chunk: int = 16,
) -> tuple[mx.array, mx.array]:
    """`kda_chunk_ref` for arguments that were checked."""
    S = p.initial_state(state)
    if p.empty:
        return p.no_output(), S

    # Inside, the state is [B, Hv, Dk, Dv]: K~ S^T is then a plain product of row-major matrices,
    # twice as fast with a plain BLAS. Callers get a view in the public orientation.
    S = S.swapaxes(-1, -2)
    outputs = []
    per_token = 4 * p.B * p.Hv * max(p.Dk, p.Dv)
    step = max(1, _SEGMENT_BYTES // (per_token * chunk)) * chunk
    for start in range(0, p.T, step):
        segment = _cut(p, (q, k, v, g, beta), lengths, start, min(start + step, p.T), chunk)
        o, S = _segment(p, *segment, S, chunk)
        outputs.append(o)
    o = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
    return o[:, : p.T], S.swapaxes(-1, -2)


def _cut(
    p: Problem,
    inputs: tuple[mx.array | None, ...],
    lengths: mx.array | None,
    start: int,
    stop: int,
    chunk: int,
) -> list[mx.array | None]:
    """Tokens start..stop in float32; padding and tokens past a row's length are zeros.

    A zero token has decay exp(0) = 1, key 0 and beta 0, so it changes nothing and outputs 0.
    """
    pad = -(stop - start) % chunk
    cut: list[mx.array | None] = []
    for x in inputs:
        if x is not None:
            x = x[:, start:stop].astype(mx.float32)
            if lengths is not None:
                inside = mx.arange(start, stop) < lengths[:, None]
                x = mx.where(inside.reshape(p.B, -1, *([1] * (x.ndim - 2))), x, 0.0)
            if pad:
                x = mx.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        cut.append(x)
    return cut


@dataclass
class _Span:
    """Consecutive tokens, L of them, in a batch of M spans: what is left of them for their chunk.

    M = (T / L) * B * Hv: time first, so that merging joins rows a whole B * Hv apart.

    kq: [M, 2, L, Dk], keys and scaled queries, decayed from the span's start (K~ and Q~).
    k_end: [M, L, Dk], keys decayed to the span's end (K^).
    decay: [M, 1, Dk], decay over the whole span.
    reads: [M, L, L], M of the equations.
    solve: [M, L, L], (I + diag(beta) N)^-1; None when nothing is erased (N = 0).
    """

    kq: mx.array
    k_end: mx.array
    decay: mx.array
    reads: mx.array
    solve: mx.array | None


def _segment(
    p: Problem,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array | None,
    beta: mx.array,
    S: mx.array,
    chunk: int,
) -> tuple[mx.array, mx.array]:
    """Prepare every chunk of a segment at once, then scan over them. S is [B, Hv, Dk, Dv]."""
    T = q.shape[1]
    n = T // chunk
    heads = (p.B, p.Hv)
    span = prepare_chunks(p, q * p.scale, k, g, beta, chunk)
    beta = _by_chunk(beta[..., None], chunk)

    def split(x: mx.array) -> mx.array:
        return x.reshape(n, *heads, *x.shape[1:])

    kq = split(span.kq.flatten(1, 2))
    k_end = split(span.k_end).swapaxes(-1, -2)
    decay = split(span.decay).swapaxes(-1, -2)
    reads = split(span.reads)
    solve = None if span.solve is None else split(span.solve) * beta.swapaxes(-1, -2)
    v = _by_chunk(v, chunk)

    outputs = []
    for i in range(n):
        past = kq[i] @ S
        errors = v[i] - past[..., :chunk, :]
        errors = beta[i] * v[i] if solve is None else solve[i] @ errors
        outputs.append(past[..., chunk:, :] + reads[i] @ errors)
        S = S * decay[i] + k_end[i] @ errors
    o = mx.stack(outputs, axis=2)  # [B, Hv, n, C, Dv]
    o = o.reshape(*heads, T, p.Dv).swapaxes(1, 2)
    return o.astype(p.dtype), S


def prepare_chunks(
    p: Problem, q: mx.array, k: mx.array, g: mx.array | None, beta: mx.array, chunk: int
) -> _Span:
    """Every chunk of a segment as one span: what the scan needs besides the state and V."""
    span = _blocks(p, q, k, g, beta)
    length = _BLOCK
    while length < chunk:
        length *= 2
        span = _merge(span, _by_chunk(beta[..., None], length).flatten(1, 2))
    return span


def _by_chunk(x: mx.array, chunk: int) -> mx.array:
    """[B, T, Hv, D] -> [T / chunk, B, Hv, chunk, D]."""
    B, T, Hv, D = x.shape
    return mx.contiguous(x.reshape(B, T // chunk, chunk, Hv, D).transpose(1, 0, 3, 2, 4))


def _blocks(p: Problem, q: mx.array, k: mx.array, g: mx.array | None, beta: mx.array) -> _Span:
    """All blocks of eight tokens as spans: running products and forward substitution."""
    q, k = (_by_token(x, p.Hv) for x in (q, k))
    beta = _by_token(beta[..., None], p.Hv)[..., 0]
    kq = mx.stack([k, q], axis=1)  # [8, 2, M, Dk]
    if g is None:
        a = mx.ones((_BLOCK, *k.shape[1:]))
    else:
        a = exp(g if g.ndim == 4 else g[..., None])
        a = _by_token(mx.broadcast_to(a, (*a.shape[:3], p.Dk)), p.Hv)

    # N and M, one diagonal at a time: r_i,i-d grows by one factor from diagonal to diagonal.
    diagonals = [_dot(kq, k[:, None])]
    r = a[1:]
    for d in range(1, _BLOCK):
        if d > 1:
            r = r[1:] * a[1 : _BLOCK - d + 1]
        diagonals.append(_dot(kq[d:], (k[:-d] * r)[:, None]))
    zero = mx.zeros((1, *diagonals[0].shape[1:]))
    table = mx.concatenate([*diagonals, zero])
    nm = table[_diagonal_index()]  # [8, 8, 2, M]

    prefix, suffix = [a[0]], [mx.ones_like(a[0])]
    for i in range(1, _BLOCK):
        prefix.append(prefix[-1] * a[i])
        suffix.append(suffix[-1] * a[_BLOCK - i])
    kq = kq * mx.stack(prefix)[:, None]
    k_end = k * mx.stack(suffix[::-1])
    return _Span(
        kq=mx.contiguous(kq.transpose(2, 1, 0, 3)),
        k_end=mx.contiguous(k_end.swapaxes(0, 1)),
        decay=prefix[-1][:, None],
        reads=nm[:, :, 1].transpose(2, 0, 1),
        solve=_substitute(nm[:, :, 0] * beta[:, None]) if p.erase else None,
    )


def _dot(x: mx.array, y: mx.array) -> mx.array:
    """Sum of products over the last axis, in a grid of partial sums.

    One running sum over 128 channels is what limits accuracy when keys repeat: the write strengths
    of a chunk then come out of differences between these numbers.
    """
    xy = x * y
    D = xy.shape[-1]
    width = next(w for w in (16, 8, 4, 2, 1) if D % w == 0)
    return xy.reshape(*xy.shape[:-1], D // width, width).sum(axis=-2).sum(axis=-1)


def _by_token(x: mx.array, Hv: int) -> mx.array:
    """[B, T, H, D] -> [8, M, D], M = (T / 8) * B * Hv: one token of every block, contiguous."""
    B, T, H, D = x.shape
    x = x.reshape(B, T // _BLOCK, _BLOCK, H, 1, D).transpose(2, 1, 0, 3, 4, 5)
    x = mx.broadcast_to(x, (*x.shape[:4], Hv // H, D))
    return mx.contiguous(x.reshape(_BLOCK, -1, D))


@cache
def _diagonal_index() -> mx.array:
    """[8, 8] rows of the table: entry (i, j) lies on diagonal i - j; above that, the zero row."""
    index = np.full((_BLOCK, _BLOCK), sum(range(1, _BLOCK + 1)))
    row = 0
    for d in range(_BLOCK):
        for i in range(d, _BLOCK):
            index[i, i - d] = row
            row += 1
    return mx.array(index)


def _substitute(L: mx.array) -> mx.array:
    """(I + strictly lower part of L)^-1 by forward substitution; L [8, 8, M] -> [M, 8, 8]."""
    eye = mx.eye(_BLOCK)[..., None]
    rows = [mx.broadcast_to(eye[0], (_BLOCK, L.shape[-1]))]
    for i in range(1, _BLOCK):
        above = mx.stack(rows)
        rows.append(eye[i] - (L[i, :i, None] * above).sum(axis=0))
    return mx.stack(rows).transpose(2, 0, 1)


def _merge(span: _Span, beta: mx.array) -> _Span:
    """Neighbouring spans, two by two, as one of twice the length.

    beta: [T / 2 L, B * Hv, 2 L, 1].
    """
    heads = beta.shape[1]

    def halves(x: mx.array) -> tuple[mx.array, mx.array]:
        x = x.reshape(-1, 2, heads, *x.shape[1:])
        return x[:, 0].flatten(0, 1), x[:, 1].flatten(0, 1)

    kq1, kq2 = halves(span.kq)
    k1, k2 = halves(span.k_end)
    w1, w2 = halves(span.decay)
    reads1, reads2 = halves(span.reads)
    L = k1.shape[1]
    beta2 = beta[:, :, L:].flatten(0, 1)
    across = _products(kq2.flatten(1, 2), k1).reshape(-1, 2, L, L)  # N and M between the halves
    solve = None
    if span.solve is not None:
        solve1, solve2 = halves(span.solve)
        solve = _lower(solve1, -(solve2 @ (beta2 * across[:, 0]) @ solve1), solve2)
    return _Span(
        kq=mx.concatenate([kq1, kq2 * w1[:, None]], axis=2),
        k_end=mx.concatenate([k1 * w2, k2], axis=1),
        decay=w1 * w2,
        reads=_lower(reads1, across[:, 1], reads2),
        solve=solve,
    )


def _products(x: mx.array, y: mx.array) -> mx.array:
    """x y^T, [M, I, D] by [M, J, D], from partial sums over 16 channels at a time (see `_dot`)."""
    D = x.shape[-1]
    width = next(w for w in (16, 8, 4, 2, 1) if D % w == 0)

    def parts(z: mx.array) -> mx.array:
        return z.reshape(*z.shape[:-1], D // width, width).swapaxes(1, 2)

    return (parts(x) @ parts(y).swapaxes(-1, -2)).sum(axis=1)


def _lower(top: mx.array, corner: mx.array, bottom: mx.array) -> mx.array:
    """[[top, 0], [corner, bottom]], batched."""
    upper = mx.concatenate([top, mx.zeros_like(top)], axis=-1)
    return mx.concatenate([upper, mx.concatenate([corner, bottom], axis=-1)], axis=-2)
