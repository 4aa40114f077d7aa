"""Wrapper of metal/kda_chunk_prepare.metal and metal/kda_chunk_scan.metal: chunks of 16 tokens."""

import mlx.core as mx

from .arguments import Gate, floats, integers, launches, lengths_or_full, read
from .arguments import supported as _dims_supported
from .sources import kernel

CHUNK = 16
THREADS = 128  # of kda_chunk_prepare
SCAN_THREADS = 256
MODES = ("exact", "half")


def supported(
    Dk: int, Dv: int, dtype: mx.Dtype, mode: str = "exact", chunk: int = CHUNK
) -> tuple[bool, str]:
    """(True, why) where `kda_chunk` can run, (False, why not) elsewhere."""
    if chunk != CHUNK:
        return False, f"the kernels work in chunks of {CHUNK} tokens, not {chunk}"
    if mode not in MODES:
        return False, f"mode must be one of {', '.join(MODES)}, got {mode!r}"
    if mode == "half" and dtype == mx.float32:
        return False, "half mode would lose most digits of float32 activations; use exact"
    return _dims_supported(Dk, Dv, dtype)


def kda_chunk(
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
    mode: str = "exact",
    segment: int | None = None,
    runner: str = "auto",
) -> tuple[mx.array, mx.array]:
    """What `kda_chunk_ref` computes, in two kernel launches for every ``segment`` tokens.

    Segments keep the workspace small (0.9 MB a head and 512 tokens at Dk = 128 in exact mode) and
    every launch short; a GPU may prepare the next one beside the scan of this one.

    Args:
        q, k, v, g, beta, scale, state, lengths, delta_rule: as `mlx_kda.kda_ref` takes them.
        gate: if given, ``g`` is the raw gate a [B, T, Hv, Dk] in any float dtype.
        beta_kind: "given", "sigmoid" (``beta`` is the raw b) or "twice" (2 sigmoid(b)).
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
        ValueError: a shape, dtype, head dimension, mode or segment that does not fit, named.
    """
    p, decay = read(q, k, v, g, beta, scale, state, lengths, delta_rule, gate, beta_kind)
    ok, reason = supported(p.Dk, p.Dv, p.dtype, mode)
    if not ok:
        raise ValueError(f"kda_chunk: {reason}")
    S = p.initial_state(state)
    if p.empty:
        return p.no_output(), S
    operand = mx.float32 if mode == "exact" else mx.float16
    prepare, scan = kernel("kda_chunk_prepare", runner), kernel("kda_chunk_scan", runner)
    ends = lengths_or_full(lengths, p.B, p.T)
    heads = p.B * p.Hv
    outputs = []
    for start, count in launches(p.T, segment, runner, CHUNK):
        chunks = -(-count // CHUNK)
        sizes = (2 * CHUNK * p.Dk, CHUNK * p.Dk, 384, p.Dk)
        workspace = prepare(
            inputs=[
                *(q, k, *decay.arrays, ends),
                integers((p.T, p.H, p.Hv, start, chunks)),
                floats((p.scale, decay.bound)),
            ],
            template=[
                ("OpT", operand),
                ("Dk", p.Dk),
                ("GATE", decay.gate),
                ("BETA", decay.beta),
                ("DELTA_RULE", delta_rule),
            ],
            grid=(THREADS * chunks, heads, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(heads, chunks, size) for size in sizes],
            output_dtypes=[operand, mx.float32, mx.float32, mx.float32],
        )
        o, S = scan(
            inputs=[*workspace, v, S, ends, integers((p.T, p.Hv, start, count, chunks))],
            template=[("OpT", operand), ("InT", p.dtype), ("Dk", p.Dk), ("Dv", p.Dv)],
            grid=(SCAN_THREADS * p.Dv // 32, heads, 1),
            threadgroup=(SCAN_THREADS, 1, 1),
            output_shapes=[(p.B, count, p.Hv, p.Dv), S.shape],
            output_dtypes=[p.dtype, mx.float32],
        )
        outputs.append(o)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), S
