"""Wrapper of metal/kda_decode.metal: a layer's step between its projections."""

from functools import lru_cache

import mlx.core as mx

from ..ops.inputs import check_decay, check_heads, check_shape
from .arguments import (
    GATES,
    LayerParameters,
    LayerState,
    Projections,
    beta_constant,
    decay_inputs,
    floats,
    integers,
    lengths_or_full,
    lower_bound,
)
from .prologue import check_layer
from .prologue import supported as _layer_supported
from .sources import kernel

MAX_TOKENS = 8


@lru_cache(maxsize=1024)
def supported(
    Dk: int, Dv: int, dtype: mx.Dtype, T: int = 1, conv_kernel: int = 4
) -> tuple[bool, str]:
    """(True, why) where `kda_decode` can run, (False, why not) elsewhere."""
    if not 1 <= T <= MAX_TOKENS:
        return False, f"T = {T}: the decode kernel takes 1 to {MAX_TOKENS} tokens"
    return _layer_supported(Dk, Dv, dtype, conv_kernel)


def kda_decode(
    p: Projections,
    w: LayerParameters,
    past: LayerState,
    *,
    lengths: mx.array | None = None,
    keep: bool = False,
    runner: str = "auto",
) -> tuple[mx.array, LayerState]:
    """A KDA layer from its projections to the input of its output projection, in one launch.

    ::

        q, k, v = silu(conv(x));  q, k <- x / sqrt(sum x^2 + 1e-6) per head
        o = kda(q, k, v, g, beta);  y = o / sqrt(mean o^2 + eps) * norm_weight * sigmoid(z)

    Args:
        p: the layer's projections of 1 to 8 tokens; without a gate in ``w``, ``a`` is a log decay,
            float32, per channel, per head [B, T, Hv] or None.
        w: its parameters; by ``beta_kind`` the write strength is raw ("sigmoid", "twice") or
            "given".
        past: what the step before returned (zeros at the start of a sequence).
        lengths: [B] integers; tokens at and past a row's length change nothing and output 0.
        keep: also return the state after every token.
        runner: "metal", "emulator", "emulator-fast", "cuda" or "auto".

    Returns:
        (y, state): y [B, T, Hv, Dv] in v's dtype, and the next layer state. With ``keep`` its
        ``state`` is [B, T, Hv, Dv, Dk]: entry t is the one after token t (`after` makes the layer
        state of it).

    Raises:
        ValueError: a shape, dtype or size that does not fit, named.
    """
    check_heads(w.H, w.Hv)
    check_layer(p, w, past)
    (B, T), Hv = p.b.shape[:2], w.Hv
    dtype, conv_kernel = p.v.dtype, w.conv_kernel
    if lengths is not None:
        check_shape("lengths", lengths, (B,), "[B]")
    ok, reason = supported(w.Dk, w.Dv, dtype, T, conv_kernel)
    if not ok:
        raise ValueError(f"kda_decode: {reason}")
    if w.gate is not None:
        w.gate.check(Hv, w.Dk)
    gate_kind = check_decay((B, T, Hv, w.Dk), p.a, p.b, w.gate)
    run, groups = kernel("kda_decode", runner), simd_groups(w.Dv)
    template = [
        ("InT", dtype),
        ("Dk", w.Dk),
        ("Dv", w.Dv),
        ("SG", groups),
        ("CONV_KERNEL", conv_kernel),
        ("GATE", GATES[gate_kind]),
        ("BETA", beta_constant(w.beta_kind)),
        ("KEEP", keep),
    ]
    windows, state = list(past[:3]), past.state
    outputs, states = [], []
    capacity = token_capacity(w.Dk, w.Dv)
    for start in range(0, T, capacity):
        count = min(capacity, T - start)
        cut = p if count == T else p.cut(start, start + count)
        left = lengths - start if start and lengths is not None else lengths
        y, state, *windows = run(
            inputs=[
                *(*cut[:3], *windows, *w.conv_weight),
                *(*decay_inputs(cut.a, cut.b, w.gate), cut.z, w.norm_weight, state),
                lengths_or_full(left, B, count),
                integers((count, w.H, Hv)),
                floats((w.Dk**-0.5, lower_bound(w.gate), float(w.eps))),
            ],
            template=template,
            grid=(32 * groups, B * Hv, 1),
            threadgroup=(32 * groups, 1, 1),
            output_shapes=[(B, count, Hv, w.Dv), (B, count if keep else 1, Hv, w.Dv, w.Dk)]
            + [window.shape for window in past[:3]],
            output_dtypes=[dtype, mx.float32, dtype, dtype, dtype],
        )
        outputs.append(y)
        states.append(state)
        state = state[:, -1] if state.shape[1] > 1 else state.squeeze(1)
    if keep:
        state = _join(states)
    return _join(outputs), LayerState.of(windows, state)


def after(
    t: int, q: mx.array, k: mx.array, v: mx.array, before: LayerState, kept: LayerState
) -> LayerState:
    """The layer state after token ``t`` of a step with ``keep``: an exact rollback.

    Args:
        t: 0 is the first token of the step.
        q, k, v: the step's projections.
        before: the layer state that went into the step.
        kept: the layer state that came out of it.
    """
    windows = []
    for x, window in zip((q, k, v), before[:3], strict=True):
        both = mx.concatenate([window, x.astype(window.dtype)], axis=1)
        windows.append(both[:, t + 1 : t + 1 + window.shape[1]])
    return LayerState.of(windows, kept.state[:, t])


def token_capacity(Dk: int, Dv: int) -> int:
    """Tokens that one launch can stage in threadgroup memory (TCAP of the kernel)."""
    return 8 if 3 * Dk + 2 * Dv <= 896 else 4


def simd_groups(Dv: int) -> int:
    """SIMD-groups of a threadgroup, at most 8: they divide the blocks of 8 value rows."""
    return max(n for n in range(1, 9) if Dv // 8 % n == 0)


def _join(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
