"""The chunkwise form of the recurrence: matrix products and one small triangular solve a chunk.

For a chunk of C tokens that starts from state S, with P_i the product of the decays up to token i
and r_ij the product of those after j up to i (per channel)::

    K~_i = k_i P_i     Q~_i = scale q_i P_i     K^_j = k_j r_Cj
    N_ij = sum_d k_i k_j r_ij  (i > j)          M_ij = sum_d scale q_i k_j r_ij  (i >= j)
    U  = (I + diag(beta) N)^-1 diag(beta) (V - K~ S^T)       the errors that get written
    O  = Q~ S^T + M U
    S' = S P_C + U^T K^

Two rules keep it as accurate as the loop, whatever the gates and keys:

1. Every decay is a product of numbers <= 1, never a quotient: exp(-G) overflows for gates that
   real models produce.
2. The inverse comes from forward substitution on 8 x 8 blocks and block merging, in float32. A
   Neumann series loses every digit when keys repeat and beta is near 1.

`spans` makes N, M and the inverse by both; here the state is carried from chunk to chunk.
"""

import mlx.core as mx

from .inputs import Problem
from .spans import by_chunk, prepare_chunks

CHUNKS = (8, 16, 32, 64)
# Arrays of a segment stay about this small: on a CPU so that they are computed from cache; on a
# GPU, which many tokens at once keep busy, so that a step's workspace stays bounded.
_SEGMENT_BYTES = {mx.DeviceType.cpu: 2 << 20, mx.DeviceType.gpu: 32 << 20}


def kda_chunk_ref(
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
    chunk: int = 16,
) -> tuple[mx.array, mx.array]:
    """What `kda_ref` computes, chunk by chunk (equations above), float32 inside.

    Arguments and results are those of `kda_ref`.

    Args:
        chunk: tokens a chunk: 8, 16, 32 or 64. Any T works; the tail is padded with tokens that
            change nothing.

    Raises:
        ValueError: a shape, dtype or chunk size that does not fit, named.
    """
    p = Problem.read(q, k, v, g, beta, scale, state, lengths, delta_rule)
    if chunk not in CHUNKS:
        raise ValueError(f"chunk must be one of {CHUNKS}, got {chunk}")
    return run(p, q, k, v, g, beta, state, lengths, chunk)


def run(
    p: Problem,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array | None,
    beta: mx.array,
    state: mx.array | None,
    lengths: mx.array | None,
    chunk: int = 16,
) -> tuple[mx.array, mx.array]:
    """`kda_chunk_ref` for arguments that were checked."""
    S = p.initial_state(state)
    if p.empty:
        return p.no_output(), S

    # Inside, the state is [B, Hv, Dk, Dv]: K~ S^T is then a plain product of row-major matrices,
    # twice as fast with a plain BLAS. Callers get a view in the public orientation.
    S = S.swapaxes(-1, -2)
    outputs = []
    segment_bytes = _SEGMENT_BYTES[mx.default_device().type]
    per_token = 4 * p.B * p.Hv * max(p.Dk, p.Dv)
    step = max(1, segment_bytes // (per_token * chunk)) * chunk
    for start in range(0, p.T, step):
        segment = _cut(p, (q, k, v, g, beta), lengths, start, min(start + step, p.T), chunk)
        o, S = _segment(p, *segment, S, chunk)
        outputs.append(o)
    o = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
    return o[:, : p.T], S.swapaxes(-1, -2)


def _cut(
    p: Problem,
    inputs: tuple[mx.array | None, ...],
    lengths: mx.array | None,
    start: int,
    stop: int,
    chunk: int,
) -> list[mx.array | None]:
    """Tokens start..stop in float32; padding and tokens past a row's length are zeros.

    A zero token has decay exp(0) = 1, key 0 and beta 0, so it changes nothing and outputs 0.
    """
    pad = -(stop - start) % chunk
    cut: list[mx.array | None] = []
    for x in inputs:
        if x is not None:
            x = x[:, start:stop].astype(mx.float32)
            if lengths is not None:
                inside = mx.arange(start, stop) < lengths[:, None]
                x = mx.where(inside.reshape(p.B, -1, *([1] * (x.ndim - 2))), x, 0.0)
            if pad:
                x = mx.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        cut.append(x)
    return cut


def _segment(
    p: Problem,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array | None,
    beta: mx.array,
    S: mx.array,
    chunk: int,
) -> tuple[mx.array, mx.array]:
    """Prepare every chunk of a segment at once, then scan over them. S is [B, Hv, Dk, Dv]."""
    T = q.shape[1]
    n = T // chunk
    heads = (p.B, p.Hv)
    span = prepare_chunks(p, q * p.scale, k, g, beta, chunk)
    beta = by_chunk(beta[..., None], chunk)

    def split(x: mx.array) -> mx.array:
        return x.reshape(n, *heads, *x.shape[1:])

    kq = split(span.kq.flatten(1, 2))
    k_end = split(span.k_end).swapaxes(-1, -2)
    decay = split(span.decay).swapaxes(-1, -2)
    reads = split(span.reads)
    solve = None if span.solve is None else split(span.solve) * beta.swapaxes(-1, -2)
    v = by_chunk(v, chunk)

    outputs = []
    for i in range(n):
        past = kq[i] @ S
        errors = v[i] - past[..., :chunk, :]
        errors = beta[i] * v[i] if solve is None else solve[i] @ errors
        outputs.append(past[..., chunk:, :] + reads[i] @ errors)
        S = S * decay[i] + k_end[i] @ errors
    o = mx.stack(outputs, axis=2)  # [B, Hv, n, C, Dv]
    o = o.reshape(*heads, T, p.Dv).swapaxes(1, 2)
    return o.astype(p.dtype), S
