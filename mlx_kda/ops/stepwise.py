"""The recurrence for a few tokens: one small matrix product reads the state once a token.

Reached as path "step" of `kda`.
"""

import mlx.core as mx

from .problem import Problem, keep_inside, prepare


def run(
    p: Problem,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array | None,
    beta: mx.array,
    state: mx.array | None,
    lengths: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """`kda_ref` for arguments that were checked, ordered for decoding.

    With a the decays and S the state before the token, the two reads of the state become one
    product, and the write is folded into the output::

        [p, r] = S [a k, a scale q]
        e = beta (v - p)         o = r + e (k . scale q)         S <- S a + e k^T

    The state that comes back is a view with Dv innermost in memory, which makes the next token's
    product one of row-major matrices; values and shape are the public ones.
    """
    S = p.initial_state(state)
    if p.empty:
        return p.no_output(), S
    S = mx.contiguous(S.swapaxes(-1, -2))

    q, k, v, a, beta = prepare(p, q, k, v, g, beta)
    kq = (q * k).sum(axis=-1, keepdims=True)
    pairs = mx.stack([k, q] if a is None else [k * a, q * a], axis=3).swapaxes(1, 2)
    past = mx.split(pairs, p.T, axis=2)  # [B, Hv, 1, 2, Dk] a token
    rows = [mx.split(x.swapaxes(1, 2), p.T, axis=2) for x in (v, beta, kq)]
    columns = mx.split(k.transpose(0, 2, 3, 1), p.T, axis=3)
    decays = [None] * p.T if a is None else mx.split(a.transpose(0, 2, 3, 1), p.T, axis=3)
    outputs = []
    steps = zip(past, *rows, columns, decays, strict=True)
    for t, (pair, v_t, beta_t, kq_t, k_t, a_t) in enumerate(steps):
        reads = pair.squeeze(2) @ S
        predicted, r = mx.split(reads, 2, axis=2)
        e = beta_t * (v_t - predicted if p.erase else v_t)
        o = r + e * kq_t
        new = S if a_t is None else S * a_t
        new = new + k_t * e
        S, o = keep_inside(lengths, t, S, new, o)
        outputs.append(o)
    o = outputs[0] if p.T == 1 else mx.concatenate(outputs, axis=2)
    return o.swapaxes(1, 2).astype(p.dtype), S.swapaxes(-1, -2)
