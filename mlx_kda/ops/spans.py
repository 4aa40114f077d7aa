"""Everything of a chunk but the state and V: spans of eight tokens, merged two by two.

The equations and their two rules are those of `chunked`. A span of tokens is either a block of
eight (`_blocks`), or two half spans merged (`_merge`).
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from .elementwise import exp
from .inputs import CheckedInputs

_BLOCK = 8


@dataclass
class Span:
    """Consecutive tokens, L of them, in a batch of M spans: what their chunk needs of them.

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


def prepare_chunks(x: CheckedInputs, chunk: int) -> Span:
    """Every chunk of a segment as one span: what the scan needs besides the state and V."""
    span = _blocks(x)
    length = _BLOCK
    while length < chunk:
        length *= 2
        span = _merge(span, by_chunk(x.beta[..., None], length).flatten(1, 2))
    return span


def by_chunk(x: mx.array, chunk: int) -> mx.array:
    """[B, T, Hv, D] -> [T / chunk, B, Hv, chunk, D]."""
    B, T, Hv, D = x.shape
    return mx.contiguous(x.reshape(B, T // chunk, chunk, Hv, D).transpose(1, 0, 3, 2, 4))


def _blocks(x: CheckedInputs) -> Span:
    """All blocks of eight tokens as spans: running products and forward substitution."""
    q, k = (_by_token(y, x.Hv) for y in (x.q * x.scale, x.k))
    beta = _by_token(x.beta[..., None], x.Hv)[..., 0]
    kq = mx.stack([k, q], axis=1)  # [8, 2, M, Dk]
    if x.g is None:
        a = mx.ones((_BLOCK, *k.shape[1:]))
    else:
        a = exp(x.g if x.g.ndim == 4 else x.g[..., None])
        a = _by_token(mx.broadcast_to(a, (*a.shape[:3], x.Dk)), x.Hv)

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
    return Span(
        kq=mx.contiguous(kq.transpose(2, 1, 0, 3)),
        k_end=mx.contiguous(k_end.swapaxes(0, 1)),
        decay=prefix[-1][:, None],
        reads=nm[:, :, 1].transpose(2, 0, 1),
        solve=_substitute(nm[:, :, 0] * beta[:, None]) if x.delta_rule else None,
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


def _merge(span: Span, beta: mx.array) -> Span:
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
    return Span(
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
