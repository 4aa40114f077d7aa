"""The recurrence for a few tokens: one small matrix product per token reads the state.

Reached as path "step" of `kda`.
"""

import mlx.core as mx

from .inputs import CheckedInputs, keep_inside, prepare


def run(x: CheckedInputs) -> tuple[mx.array, mx.array]:
    """`kda_ref` for arguments that were checked, ordered for decoding.

    With a the decays and S the state before the token, the two reads of the state become one
    product, and the write is folded into the output::

        [p, r] = S [a k, a scale q]
        e = beta (v - p)         o = r + e (k . scale q)         S <- S a + e k^T

    The state that comes back is a view with Dv innermost in memory, which makes the next token's
    product one of row-major matrices; values and shape are the public ones.
    """
    if x.empty:
        return x.empty_result()
    arrays = (x.q, x.k, x.v, x.g, x.beta, x.initial_state())
    if x.T == 1 and x.lengths is None:
        scale = mx.array(x.scale)  # a number would be compiled in
        o, S = _one_token(scale, *arrays, x.delta_rule)
    else:
        o, S = _tokens(x.scale, *arrays, x.delta_rule, x.lengths)
    return o.astype(x.dtype), S


def _tokens(
    scale: float | mx.array,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array | None,
    beta: mx.array,
    S: mx.array,
    delta_rule: bool,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    T = q.shape[1]
    S = mx.contiguous(S.swapaxes(-1, -2))
    q, k, v, a, beta = prepare(scale, q, k, v, g, beta)
    kq = (q * k).sum(axis=-1, keepdims=True)
    past = mx.stack([k, q] if a is None else [k * a, q * a], axis=3)
    rows = [_split(x[:, :, :, None], T) for x in (v, beta, kq)]
    columns = [[None] * T if x is None else _split(x[..., None], T) for x in (k, a)]
    outputs = []
    for t, (pair, v_t, beta_t, kq_t, k_t, a_t) in enumerate(
        zip(_split(past, T), *rows, *columns, strict=True)
    ):
        predicted, r = mx.split(pair @ S, 2, axis=2)
        e = beta_t * (v_t - predicted if delta_rule else v_t)
        o = r + e * kq_t
        new = S if a_t is None else S * a_t
        new = new + k_t * e
        S, o = keep_inside(lengths, t, S, new, o)
        outputs.append(o)
    o = outputs[0] if T == 1 else mx.concatenate(outputs, axis=2)
    return o.swapaxes(1, 2), S.swapaxes(-1, -2)


def _split(x: mx.array, T: int) -> list[mx.array]:
    """[B, T, ...] -> T times [B, ...]."""
    return [x.squeeze(1)] if T == 1 else [y.squeeze(1) for y in mx.split(x, T, axis=1)]


# Decoding asks for the same few operations every time: compiled, they are fewer.
_one_token = mx.compile(_tokens)
