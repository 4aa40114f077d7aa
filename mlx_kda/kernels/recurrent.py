"""Wrapper of metal/kda_recurrent.metal: the recurrence token by token."""

import mlx.core as mx

from ..ops.inputs import CheckedInputs
from .arguments import (
    GATES,
    beta_constant,
    decay_inputs,
    floats,
    integers,
    launches,
    lengths_or_full,
    lower_bound,
    supported,
)
from .sources import kernel

THREADS = 128
ROWS = 32


def kda_recurrent(
    x: CheckedInputs, *, segment: int | None = None, runner: str = "auto"
) -> tuple[mx.array, mx.array]:
    """What `kda_ref` computes, in one kernel launch for every ``segment`` tokens.

    Args:
        x: the op's arguments; the gate may be raw.
        segment: the most tokens of one launch; 512, or 8,192 on CUDA, unless given.
        runner: "metal", "emulator", "emulator-fast", "cuda" or "auto".

    Returns:
        (o, state): [B, T, Hv, Dv] in v's dtype, [B, Hv, Dv, Dk] float32.

    Raises:
        ValueError: a head dimension or segment that does not fit, named.
    """
    ok, reason = supported(x.Dk, x.Dv, x.dtype)
    if not ok:
        raise ValueError(f"kda_recurrent: {reason}")
    beta = beta_constant(x.beta_kind)
    if x.empty:
        return x.empty_result()
    S = x.initial_state()
    run = kernel("kda_recurrent", runner)
    decay = decay_inputs(x.g, x.beta, x.gate)
    ends = lengths_or_full(x.lengths, x.B, x.T)
    outputs = []
    for start, count in launches(x.T, segment, runner):
        o, S = run(
            inputs=[
                *(x.q, x.k, x.v, *decay, S, ends),
                integers((x.T, x.H, x.Hv, start, count)),
                floats((x.scale, lower_bound(x.gate))),
            ],
            template=[
                ("InT", x.dtype),
                ("Dk", x.Dk),
                ("Dv", x.Dv),
                ("GATE", GATES[x.gate_kind]),
                ("BETA", beta),
                ("DELTA_RULE", x.delta_rule),
            ],
            grid=(THREADS * x.Dv // ROWS, x.B * x.Hv, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(x.B, count, x.Hv, x.Dv), S.shape],
            output_dtypes=[x.dtype, mx.float32],
        )
        outputs.append(o)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), S
