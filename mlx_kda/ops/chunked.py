"""The chunkwise form of the recurrence: matrix products and one small triangular solve per chunk.

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

from .inputs import CheckedInputs
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
        chunk: tokens per chunk: 8, 16, 32 or 64. Any T works; the tail is padded with tokens that
            change nothing.

    Raises:
        ValueError: a shape, dtype or chunk size that does not fit, named.
    """
    inputs = CheckedInputs(
        q, k, v, g, beta, scale=scale, state=state, lengths=lengths, delta_rule=delta_rule
    )
    if chunk not in CHUNKS:
        raise ValueError(f"chunk must be one of {CHUNKS}, got {chunk}")
    return run(inputs, chunk)


def run(x: CheckedInputs, chunk: int = 16) -> tuple[mx.array, mx.array]:
    """`kda_chunk_ref` for arguments that were checked."""
    if x.empty:
        return x.empty_result()

    # Inside, the state is [B, Hv, Dk, Dv]: K~ S^T is then a plain product of row-major matrices,
    # twice as fast with a plain BLAS. Callers get a view in the public orientation.
    S = x.initial_state().swapaxes(-1, -2)
    outputs = []
    segment_bytes = _SEGMENT_BYTES[mx.default_device().type]
    per_token = 4 * x.B * x.Hv * max(x.Dk, x.Dv)
    step = max(1, segment_bytes // (per_token * chunk)) * chunk
    for start in range(0, x.T, step):
        o, S = _segment(_cut(x, start, min(start + step, x.T), chunk), S, chunk)
        outputs.append(o)
    o = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
    return o[:, : x.T], S.swapaxes(-1, -2)


def _cut(x: CheckedInputs, start: int, stop: int, chunk: int) -> CheckedInputs:
    """Tokens start..stop in float32; padding and tokens past a row's length are zeros.

    A zero token has decay exp(0) = 1, key 0 and beta 0, so it changes nothing and outputs 0.
    """
    pad = -(stop - start) % chunk
    cut = {}
    for name in ("q", "k", "v", "beta", "g"):
        if name == "g" and x.g is None:
            continue
        y = getattr(x, name)[:, start:stop].astype(mx.float32)
        if x.lengths is not None:
            inside = mx.arange(start, stop) < x.lengths[:, None]
            y = mx.where(inside.reshape(x.B, -1, *([1] * (y.ndim - 2))), y, 0.0)
        if pad:
            y = mx.pad(y, [(0, 0), (0, pad)] + [(0, 0)] * (y.ndim - 2))
        cut[name] = y
    return x.replace(**cut)


def _segment(x: CheckedInputs, S: mx.array, chunk: int) -> tuple[mx.array, mx.array]:
    """Prepare every chunk of a segment at once, then scan over them. S is [B, Hv, Dk, Dv]."""
    T = x.q.shape[1]
    n = T // chunk
    heads = (x.B, x.Hv)
    span = prepare_chunks(x, chunk)
    beta = by_chunk(x.beta[..., None], chunk)

    def split(y: mx.array) -> mx.array:
        return y.reshape(n, *heads, *y.shape[1:])

    kq = split(span.kq.flatten(1, 2))
    k_end = split(span.k_end).swapaxes(-1, -2)
    decay = split(span.decay).swapaxes(-1, -2)
    reads = split(span.reads)
    solve = None if span.solve is None else split(span.solve) * beta.swapaxes(-1, -2)
    v = by_chunk(x.v, chunk)

    outputs = []
    for i in range(n):
        past = kq[i] @ S
        errors = v[i] - past[..., :chunk, :]
        errors = beta[i] * v[i] if solve is None else solve[i] @ errors
        outputs.append(past[..., chunk:, :] + reads[i] @ errors)
        S = S * decay[i] + k_end[i] @ errors
    o = mx.stack(outputs, axis=2)  # [B, Hv, n, C, Dv]
    o = o.reshape(*heads, T, x.Dv).swapaxes(1, 2)
    return o.astype(x.dtype), S
