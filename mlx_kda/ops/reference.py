"""The recurrence as the papers write it: one token at a time, nothing reordered."""

import mlx.core as mx

from .inputs import CheckedInputs, keep_inside, prepare


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
    delta_rule: bool = True,
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
        g: natural-log decay, float32: [B, T, Hv, Dk] per channel (KDA), [B, T, Hv] per head
            (Gated DeltaNet), or None (DeltaNet).
        beta: [B, T, Hv], write strength, already in (0, 1) or (0, 2).
        scale: factor on q, Dk**-0.5 unless given.
        state: [B, Hv, Dv, Dk] float32; zeros unless given.
        lengths: [B] integers; tokens at and past a row's length change nothing and output 0.
        delta_rule: False leaves ``S k_t`` out: (gated) linear attention.

    Returns:
        (o, state): [B, T, Hv, Dv] in v's dtype, [B, Hv, Dv, Dk] float32. Inputs are not changed.

    Raises:
        ValueError: a shape or dtype that does not fit, named.
    """
    inputs = CheckedInputs(
        q, k, v, g, beta, scale=scale, state=state, lengths=lengths, delta_rule=delta_rule
    )
    return run(inputs)


def run(x: CheckedInputs) -> tuple[mx.array, mx.array]:
    """`kda_ref` for arguments that were checked."""
    if x.empty:
        return x.empty_result()
    S = x.initial_state()
    q, k, v, a, beta = prepare(x.scale, x.q, x.k, x.v, x.g, x.beta)
    # One row vector of keys or one column vector of values per token and head.
    rows = [mx.split(y.swapaxes(1, 2), x.T, axis=2) for y in (q, k)]
    columns = [mx.split(y.transpose(0, 2, 3, 1), x.T, axis=3) for y in (v, beta)]
    decays = [None] * x.T if a is None else mx.split(a.swapaxes(1, 2), x.T, axis=2)
    outputs = []
    for t, (q_t, k_t, v_t, beta_t, a_t) in enumerate(zip(*rows, *columns, decays, strict=True)):
        new = S if a_t is None else S * a_t
        e = v_t - (new * k_t).sum(axis=-1, keepdims=True) if x.delta_rule else v_t
        e = beta_t * e
        new = new + e * k_t
        o = (new * q_t).sum(axis=-1, keepdims=True)
        S, o = keep_inside(x.lengths, t, S, new, o)
        outputs.append(o)
    o = outputs[0] if x.T == 1 else mx.concatenate(outputs, axis=3)  # [B, Hv, Dv, T]
    return o.transpose(0, 3, 1, 2).astype(x.dtype), S
