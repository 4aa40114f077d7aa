"""Wrapper of metal/kda_decode.metal: a layer's step between its projections."""

from typing import NamedTuple

import mlx.core as mx

from .arguments import Decay, Gate, floats, integers, lengths_or_full
from .arguments import supported as _dims_supported
from .prologue import MAX_CONV_KERNEL, check, check_conv
from .sources import kernel

MAX_TOKENS = 8


class Memory(NamedTuple):
    """What a step hands to the next."""

    q: mx.array  # window [B, conv_kernel - 1, H * Dk]
    k: mx.array  # window [B, conv_kernel - 1, H * Dk]
    v: mx.array  # window [B, conv_kernel - 1, Hv * Dv]
    state: mx.array  # [B, Hv, Dv, Dk] float32


def supported(
    Dk: int, Dv: int, dtype: mx.Dtype, T: int = 1, conv_kernel: int = 4
) -> tuple[bool, str]:
    """(True, why) where `kda_decode` can run, (False, why not) elsewhere."""
    if not 1 <= T <= MAX_TOKENS:
        return False, f"T = {T}: the decode kernel takes 1 to {MAX_TOKENS} tokens"
    if not 2 <= conv_kernel <= MAX_CONV_KERNEL:
        return (
            False,
            f"a convolution over {conv_kernel} tokens: the kernel takes 2 to {MAX_CONV_KERNEL}",
        )
    return _dims_supported(Dk, Dv, dtype)


def kda_decode(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array | None,
    beta: mx.array,
    z: mx.array,
    *,
    conv_weight: tuple[mx.array, mx.array, mx.array],
    weight: mx.array,
    eps: float,
    memory: Memory,
    gate: Gate | None = None,
    beta_kind: str = "sigmoid",
    scale: float | None = None,
    lengths: mx.array | None = None,
    keep: bool = False,
    runner: str = "auto",
) -> tuple[mx.array, Memory]:
    """A KDA layer from its projections to the input of its output projection, in one launch.

    ::

        q, k, v = silu(conv(x));  q, k <- x / sqrt(sum x^2 + 1e-6) a head
        o = kda(q, k, v, g, beta);  y = o / sqrt(mean o^2 + eps) * weight * sigmoid(z)

    Args:
        q, k: [B, T, H * Dk], T from 1 to 8: projections, before the convolution.
        v: [B, T, Hv * Dv].
        g: raw gate a [B, T, Hv, Dk] if ``gate`` is given, otherwise a log decay, float32, per
            channel, [B, T, Hv] or None.
        beta: [B, T, Hv]; by ``beta_kind`` raw ("sigmoid", "twice") or "given".
        z: [B, T, Hv, Dv], raw output gate.
        conv_weight: of q, k, v, [channels, conv_kernel] or [channels, conv_kernel, 1].
        weight, eps: of the output norm; weight [Dv].
        memory: what the step before returned (zeros at the start of a text).
        scale: factor on q, Dk**-0.5 unless given.
        lengths: [B] integers; tokens at and past a row's length change nothing and output 0.
        keep: also return the state after every token.
        runner: "metal", "emulator", "emulator-fast", "cuda" or "auto".

    Returns:
        (y, memory): y [B, T, Hv, Dv] in v's dtype, and the next memory. With ``keep`` its state is
        [B, T, Hv, Dv, Dk]: entry t is the state after token t (`after` makes the memory of it).

    Raises:
        ValueError: a shape, dtype or size that does not fit, named.
    """
    if memory.state.ndim != 4 or memory.state.dtype != mx.float32:
        raise ValueError(
            f"state must be [B, Hv, Dv, Dk] float32, got {memory.state.shape} {memory.state.dtype}"
        )
    B, Hv, Dv, Dk = memory.state.shape
    T = q.shape[1] if q.ndim == 3 else 0
    H = q.shape[-1] // Dk
    width = check_conv(q, k, v, conv_weight, memory[:3], (B, T, H * Dk, Hv * Dv))
    check("z", z, (B, T, Hv, Dv))
    if H == 0 or Hv % H:
        raise ValueError(f"Hv (heads of v, {Hv}) must be a multiple of H (heads of q, {H})")
    if weight.size != Dv:
        raise ValueError(f"weight must be [Dv] = {(Dv,)}, got shape {weight.shape}")
    if lengths is not None:
        check("lengths", lengths, (B,))
    ok, reason = supported(Dk, Dv, v.dtype, T, width)
    if not ok:
        raise ValueError(f"kda_decode: {reason}")

    options = {"gate": gate, "beta_kind": beta_kind, "keep": keep, "runner": runner}
    params = (Dk**-0.5 if scale is None else float(scale), float(eps))
    step = token_capacity(Dk, Dv)
    arrays = (q, k, v, g, beta, z)
    if step >= T:
        y, memory = _launch(*arrays, conv_weight, weight, params, memory, lengths, **options)
        return y, memory if keep else memory._replace(state=memory.state.squeeze(1))
    parts, states = [], []
    for start in range(0, T, step):
        cut = [None if x is None else x[:, start : start + step] for x in arrays]
        left = None if lengths is None else lengths - start
        y, memory = _launch(*cut, conv_weight, weight, params, memory, left, **options)
        parts.append(y)
        states.append(memory.state)
        memory = memory._replace(state=memory.state[:, -1])
    y = mx.concatenate(parts, axis=1)
    if keep:
        memory = memory._replace(state=mx.concatenate(states, axis=1))
    return y, memory


def _launch(
    q,
    k,
    v,
    g,
    beta,
    z,
    conv_weight,
    weight,
    params,
    memory,
    lengths,
    *,
    gate,
    beta_kind,
    keep,
    runner,
):
    """One launch, of no more tokens than fit; the state comes back as [B, T or 1, Hv, Dv, Dk]."""
    B, Hv, Dv, Dk = memory.state.shape
    T, H = q.shape[1], q.shape[-1] // Dk
    decay = Decay.read((B, T, Hv, Dk), g, beta, gate, beta_kind)
    groups = simd_groups(Dv)
    scale, eps = params
    y, state, *windows = kernel("kda_decode", runner)(
        inputs=[
            *(q, k, v, *memory[:3], *conv_weight, *decay.arrays, z, weight, memory.state),
            lengths_or_full(lengths, B, T),
            integers((T, H, Hv)),
            floats((scale, decay.bound, eps)),
        ],
        template=[
            ("InT", v.dtype),
            ("Dk", Dk),
            ("Dv", Dv),
            ("SG", groups),
            ("CONV_KERNEL", conv_weight[0].shape[1]),
            ("GATE", decay.gate),
            ("BETA", decay.beta),
            ("KEEP", keep),
        ],
        grid=(32 * groups, B * Hv, 1),
        threadgroup=(32 * groups, 1, 1),
        output_shapes=[(B, T, Hv, Dv), (B, T if keep else 1, Hv, Dv, Dk)]
        + [window.shape for window in memory[:3]],
        output_dtypes=[v.dtype, mx.float32, v.dtype, v.dtype, v.dtype],
    )
    return y, Memory(*windows, state)


def after(t: int, q: mx.array, k: mx.array, v: mx.array, before: Memory, kept: Memory) -> Memory:
    """The memory after token ``t`` of a step with ``keep``: an exact rollback.

    Args:
        t: 0 is the first token of the step.
        q, k, v: the step's projections.
        before: the memory that went into the step.
        kept: the memory that came out of it.
    """
    windows = []
    for x, window in zip((q, k, v), before[:3], strict=True):
        both = mx.concatenate([window, x.astype(window.dtype)], axis=1)
        windows.append(both[:, t + 1 : t + 1 + window.shape[1]])
    return Memory(*windows, kept.state[:, t])


def token_capacity(Dk: int, Dv: int) -> int:
    """Tokens that one launch can stage in threadgroup memory (TCAP of the kernel)."""
    return 8 if 3 * Dk + 2 * Dv <= 896 else 4


def simd_groups(Dv: int) -> int:
    """SIMD-groups of a threadgroup, at most 8: they divide the blocks of 8 value rows."""
    return max(n for n in range(1, 9) if Dv // 8 % n == 0)
