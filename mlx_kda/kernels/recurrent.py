"""Wrapper of metal/kda_recurrent.metal: the recurrence token by token."""

import mlx.core as mx

from .arguments import Gate, floats, integers, launches, lengths_or_full, read
from .arguments import supported as _dims_supported
from .sources import kernel

THREADS = 128
ROWS = 32


def supported(Dk: int, Dv: int, dtype: mx.Dtype) -> tuple[bool, str]:
    """(True, why) where `kda_recurrent` can run, (False, why not) elsewhere."""
    return _dims_supported(Dk, Dv, dtype)


def kda_recurrent(
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
    gate: Gate | None = None,
    beta_kind: str = "given",
    segment: int | None = None,
    runner: str = "auto",
) -> tuple[mx.array, mx.array]:
    """What `kda_ref` computes, in one kernel launch for every ``segment`` tokens.

    Args:
        q, k, v, g, beta, scale, state, lengths, delta_rule: as `mlx_kda.kda_ref` takes them.
        gate: if given, ``g`` is the raw gate a [B, T, Hv, Dk] in any float dtype.
        beta_kind: "given", "sigmoid" (``beta`` is the raw b) or "twice" (2 sigmoid(b)).
        segment: the most tokens of one launch; 512, or 8,192 on CUDA, unless given.
        runner: "metal", "emulator", "emulator-fast", "cuda" or "auto".

    Returns:
        (o, state): [B, T, Hv, Dv] in v's dtype, [B, Hv, Dv, Dk] float32.

    Raises:
        ValueError: a shape, dtype, head dimension or segment that does not fit, named.
    """
    p, decay = read(q, k, v, g, beta, scale, state, lengths, delta_rule, gate, beta_kind)
    ok, reason = supported(p.Dk, p.Dv, p.dtype)
    if not ok:
        raise ValueError(f"kda_recurrent: {reason}")
    S = p.initial_state(state)
    if p.empty:
        return p.no_output(), S
    run = kernel("kda_recurrent", runner)
    ends = lengths_or_full(lengths, p.B, p.T)
    outputs = []
    for start, count in launches(p.T, segment, runner):
        o, S = run(
            inputs=[
                *(q, k, v, *decay.arrays, S, ends),
                integers((p.T, p.H, p.Hv, start, count)),
                floats((p.scale, decay.bound)),
            ],
            template=template(p.dtype, p.Dk, p.Dv, decay, delta_rule),
            grid=(THREADS * p.Dv // ROWS, p.B * p.Hv, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(p.B, count, p.Hv, p.Dv), S.shape],
            output_dtypes=[p.dtype, mx.float32],
        )
        outputs.append(o)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), S


def template(dtype: mx.Dtype, Dk: int, Dv: int, decay, delta_rule: bool) -> list:
    return [
        ("InT", dtype),
        ("Dk", Dk),
        ("Dv", Dv),
        ("GATE", decay.gate),
        ("BETA", decay.beta),
        ("DELTA_RULE", delta_rule),
    ]
