"""The recurrence for a few tokens: one small matrix product reads the state once a token."""

import mlx.core as mx

from .problem import Problem, keep_inside, prepare


def kda_step(
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
) -> tuple[mx.array, mx.array]:
    """What `kda_ref` computes, ordered for decoding; arguments and results are those of `kda_ref`.

    With a the decays and S the state before the token, the two reads of the state become one
    product, and the write is folded into the output::

        [p, r] = S [a k, a scale q]
        e = beta (v - p)         o = r + e (k . scale q)         S <- S a + e k^T

    The state that comes back is a view with Dv innermost in memory, which makes the next token's
    product one of row-major matrices; values and shape are the public ones.
    """
    p = Problem.read(q, k, v, g, beta, scale, state, lengths, erase)
    S = p.initial_state(state)
    if p.T == 0:
        return mx.zeros((p.B, 0, p.Hv, p.Dv), dtype=p.dtype), S
    S = mx.contiguous(S.swapaxes(-1, -2))

    q, k, v, a, beta = prepare(p, q, k, v, g, beta)
    kq = (q * k).sum(axis=-1, keepdims=True)
    rows = mx.stack([k, q] if a is None else [k * a, q * a], axis=-2)  # [B, T, Hv, 2, Dk]
    outputs = []
    for t in range(p.T):
        past = rows[:, t] @ S
        e = v[:, t] - past[..., 0, :] if erase else v[:, t]
        e = beta[:, t, :, None] * e
        o = past[..., 1, :] + e * kq[:, t]
        new = S if a is None else S * a[:, t, ..., None]
        new = new + k[:, t, ..., None] * e[..., None, :]
        S, o = keep_inside(lengths, t, S, new, o)
        outputs.append(o)
    return mx.stack(outputs, axis=1).astype(p.dtype), S.swapaxes(-1, -2)
