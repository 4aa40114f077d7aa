"""Wrapper of metal/kda_chunk_prepare.metal and metal/kda_chunk_scan.metal: chunks of 16 tokens."""

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
)
from .arguments import supported as _dims_supported
from .sources import kernel

CHUNK = 16
THREADS = 128  # of kda_chunk_prepare
SCAN_THREADS = 256
MODES = ("exact", "half")


def supported(Dk: int, Dv: int, dtype: mx.Dtype, mode: str = "exact") -> tuple[bool, str]:
    """(True, why) where `kda_chunk` can run, (False, why not) elsewhere."""
    if mode not in MODES:
        return False, f"mode must be one of {', '.join(MODES)}, got {mode!r}"
    if mode == "half" and dtype == mx.float32:
        return False, "half mode would lose most digits of float32 activations; use exact"
    return _dims_supported(Dk, Dv, dtype)


def kda_chunk(
    x: CheckedInputs, *, mode: str = "exact", segment: int | None = None, runner: str = "auto"
) -> tuple[mx.array, mx.array]:
    """What `kda_chunk_ref` computes, in two kernel launches for every ``segment`` tokens.

    Segments keep the workspace small (0.9 MB per head and 512 tokens at Dk = 128 in exact mode)
    and every launch short; a GPU may prepare the next one beside the scan of this one.

    Args:
        x: the op's arguments; the gate may be raw.
        mode: "exact", float operands, as accurate as the recurrence in float32; or "half", K~
            and Q~ in float16 (the state, its updates and all sums stay float32), for 16-bit
            activations of at most 65,504: an output then errs by about 2**-12 |scale q| |S|, which
            shows where it is much smaller than that.
        segment: tokens of one pair of launches, a multiple of 16; 512, or 8,192 on CUDA, unless
            given.
        runner: "metal", "emulator", "emulator-fast", "cuda" or "auto".

    Returns:
        (o, state): [B, T, Hv, Dv] in v's dtype, [B, Hv, Dv, Dk] float32.

    Raises:
        ValueError: a head dimension, mode or segment that does not fit, named.
    """
    ok, reason = supported(x.Dk, x.Dv, x.dtype, mode)
    if not ok:
        raise ValueError(f"kda_chunk: {reason}")
    beta = beta_constant(x.beta_kind)
    if x.empty:
        return x.empty_result()
    S = x.initial_state()
    operand = mx.float32 if mode == "exact" else mx.float16
    prepare, scan = kernel("kda_chunk_prepare", runner), kernel("kda_chunk_scan", runner)
    decay = decay_inputs(x.g, x.beta, x.gate)
    ends = lengths_or_full(x.lengths, x.B, x.T)
    heads = x.B * x.Hv
    outputs = []
    for start, count in launches(x.T, segment, runner, CHUNK):
        chunks = -(-count // CHUNK)
        sizes = (2 * CHUNK * x.Dk, CHUNK * x.Dk, 384, x.Dk)
        workspace = prepare(
            inputs=[
                *(x.q, x.k, *decay, ends),
                integers((x.T, x.H, x.Hv, start, chunks)),
                floats((x.scale, lower_bound(x.gate))),
            ],
            template=[
                ("OpT", operand),
                ("Dk", x.Dk),
                ("GATE", GATES[x.gate_kind]),
                ("BETA", beta),
                ("DELTA_RULE", x.delta_rule),
            ],
            grid=(THREADS * chunks, heads, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(heads, chunks, size) for size in sizes],
            output_dtypes=[operand, mx.float32, mx.float32, mx.float32],
        )
        o, S = scan(
            inputs=[*workspace, x.v, S, ends, integers((x.T, x.Hv, start, count, chunks))],
            template=[("OpT", operand), ("InT", x.dtype), ("Dk", x.Dk), ("Dv", x.Dv)],
            grid=(SCAN_THREADS * x.Dv // 32, heads, 1),
            threadgroup=(SCAN_THREADS, 1, 1),
            output_shapes=[(x.B, count, x.Hv, x.Dv), S.shape],
            output_dtypes=[x.dtype, mx.float32],
        )
        outputs.append(o)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), S
