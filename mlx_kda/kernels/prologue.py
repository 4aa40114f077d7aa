"""Wrapper of metal/kda_prologue.metal: convolution, SiLU and L2 norms before a prefill."""

import mlx.core as mx

from ..ops.inputs import check_heads
from .arguments import LayerParameters, LayerState, Projections, integers, lengths_or_full
from .arguments import supported as _dims_supported
from .sources import kernel

TOKENS = 16
MAX_CONV_KERNEL = 8


def supported(Dk: int, Dv: int, dtype: mx.Dtype, conv_kernel: int = 4) -> tuple[bool, str]:
    """(True, why) where `kda_prologue` can run, (False, why not) elsewhere."""
    if not 2 <= conv_kernel <= MAX_CONV_KERNEL:
        why = f"the kernels take 2 to {MAX_CONV_KERNEL}"
        return False, f"a convolution over {conv_kernel} tokens: {why}"
    return _dims_supported(Dk, Dv, dtype)


def kda_prologue(
    p: Projections,
    w: LayerParameters,
    past: LayerState,
    *,
    lengths: mx.array | None = None,
    runner: str = "auto",
) -> tuple[tuple[mx.array, mx.array, mx.array], tuple[mx.array, ...]]:
    """From a layer's projections to unit q and k and to v, and the windows of the next call.

    ::

        q, k, v = silu(conv(x));  q, k <- x / sqrt(sum x^2 + 1e-6) per head

    Args:
        p, w, past: the layer's projections of T >= 1 tokens, its parameters and its state.
        lengths: [B] integers; tokens past a row's length output 0 and do not enter its window.
        runner: "metal", "emulator", "emulator-fast", "cuda" or "auto".

    Returns:
        ((q, k, v), windows): q, k [B, T, H, Dk] and v [B, T, Hv, Dv] in v's dtype.

    Raises:
        ValueError: a shape, dtype or size that does not fit, named.
    """
    check_heads(w.H, w.Hv)
    check_layer(p, w, past)
    B, T, _ = p.v.shape
    dtype, conv_kernel = p.v.dtype, w.conv_kernel
    ok, reason = supported(w.Dk, w.Dv, dtype, conv_kernel)
    if not ok:
        raise ValueError(f"kda_prologue: {reason}")
    q, k, v, *windows = kernel("kda_prologue", runner)(
        inputs=[
            *(*p[:3], *past[:3], *w.conv_weight),
            lengths_or_full(lengths, B, T),
            integers((T, w.H, w.Hv)),
        ],
        template=[("InT", dtype), ("Dk", w.Dk), ("Dv", w.Dv), ("CONV_KERNEL", conv_kernel)],
        grid=(96 * -(-T // TOKENS), B * w.Hv, 1),
        threadgroup=(96, 1, 1),
        output_shapes=[(B, T, w.H, w.Dk), (B, T, w.H, w.Dk), (B, T, w.Hv, w.Dv)]
        + [window.shape for window in past[:3]],
        output_dtypes=[dtype] * 6,
    )
    return (q, k, v), tuple(windows)


def check_layer(p: Projections, w: LayerParameters, past: LayerState) -> None:
    """Check projections, weights and windows against one another; a ValueError names the array."""
    H, Hv, Dk, Dv = w[:4]
    B, T = p.b.shape[:2]
    kernel, *_ = w.conv_weight[0].shape[1:]
    keys, values = H * Dk, Hv * Dv
    for name, x, shape in (
        ("q", p.q, (B, T, keys)),
        ("k", p.k, (B, T, keys)),
        ("v", p.v, (B, T, values)),
        ("z", p.z, (B, T, Hv, Dv)),
        ("the window of q", past.q, (B, kernel - 1, keys)),
        ("the window of k", past.k, (B, kernel - 1, keys)),
        ("the window of v", past.v, (B, kernel - 1, values)),
        ("state", past.state, (B, Hv, Dv, Dk)),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    for name, weight, size in zip("qkv", w.conv_weight, (keys, keys, values), strict=True):
        if weight.size != size * kernel:
            want = [size, kernel]
            raise ValueError(f"conv_weight of {name} must be {want}, got shape {weight.shape}")
    if past.state.dtype != mx.float32:
        raise ValueError(f"state must be float32, got {past.state.dtype}")
    if w.norm_weight.size != Dv:
        raise ValueError(f"norm_weight must be [Dv] = {(Dv,)}, got shape {w.norm_weight.shape}")
