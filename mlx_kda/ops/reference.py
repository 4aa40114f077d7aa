"""The recurrence as the papers write it: one token at a time, nothing reordered."""

import mlx.core as mx

from .problem import Problem, keep_inside, prepare


def kda_ref(
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
    """Kimi Delta Attention, token by token, float32 inside.

    For each head, with S of shape Dv x Dk::

        S <- S * exp(g_t)                forget: every key channel at its own rate
        e  = beta_t (v_t - S k_t)        predict what is stored at the key, and correct
        S <- S + e k_t^T                 write
        o  = S (scale q_t)               read

    Args:
        q, k: [B, T, H, Dk] float32, float16 or bfloat16.
        v: [B, T, Hv, Dv], Hv a multiple of H; value head h reads key head h // (Hv // H).
        g: natural-log decay, float32: [B, T, Hv, Dk] per channel (KDA), [B, T, Hv] one number a
            head (Gated DeltaNet), or None (DeltaNet).
        beta: [B, T, Hv], write strength, already in (0, 1) or (0, 2).
        scale: factor on q, Dk**-0.5 unless given.
        state: [B, Hv, Dv, Dk] float32; zeros unless given.
        lengths: [B] integers; tokens at and past a row's length change nothing and output 0.
        erase: False leaves ``S k_t`` out: (gated) linear attention.

    Returns:
        (o, state): [B, T, Hv, Dv] in v's dtype, [B, Hv, Dv, Dk] float32. Inputs are not changed.

    Raises:
        ValueError: a shape or dtype that does not fit, named.
    """
    p = Problem.read(q, k, v, g, beta, scale, state, lengths, erase)
    S = p.initial_state(state)
    if p.T == 0:
        return mx.zeros((p.B, 0, p.Hv, p.Dv), dtype=p.dtype), S

    q, k, v, a, beta = prepare(p, q, k, v, g, beta)
    outputs = []
    for t in range(p.T):
        key, query = k[:, t, :, None], q[:, t, :, None]  # rows, against [B, Hv, Dv, Dk]
        new = S if a is None else S * a[:, t, :, None]
        e = v[:, t] - (new * key).sum(axis=-1) if erase else v[:, t]
        e = beta[:, t, :, None] * e
        new = new + e[..., None] * key
        o = (new * query).sum(axis=-1)
        S, o = keep_inside(lengths, t, S, new, o)
        outputs.append(o)
    return mx.stack(outputs, axis=1).astype(p.dtype), S
