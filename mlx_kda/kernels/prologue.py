"""Wrapper of metal/kda_prologue.metal: convolution, SiLU and L2 norms before a prefill."""

import mlx.core as mx

from .arguments import integers, lengths_or_full
from .arguments import supported as _dims_supported
from .sources import kernel

TOKENS = 16
MAX_CONV_KERNEL = 8


def supported(Dk: int, Dv: int, dtype: mx.Dtype, conv_kernel: int = 4) -> tuple[bool, str]:
    """(True, why) where `kda_prologue` can run, (False, why not) elsewhere."""
    if not 2 <= conv_kernel <= MAX_CONV_KERNEL:
        return (
            False,
            f"a convolution over {conv_kernel} tokens: the kernel takes 2 to {MAX_CONV_KERNEL}",
        )
    return _dims_supported(Dk, Dv, dtype)


def kda_prologue(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    conv_weight: tuple[mx.array, mx.array, mx.array],
    windows: tuple[mx.array, mx.array, mx.array],
    H: int,
    Hv: int,
    lengths: mx.array | None = None,
    runner: str = "auto",
) -> tuple[tuple[mx.array, mx.array, mx.array], tuple[mx.array, mx.array, mx.array]]:
    """From a layer's projections to unit q and k and to v, and the windows of the next call.

    ::

        q, k, v = silu(conv(x));  q, k <- x / sqrt(sum x^2 + 1e-6) a head

    Args:
        q, k: [B, T, H * Dk], T >= 1: projections, before the convolution.
        v: [B, T, Hv * Dv].
        conv_weight: of q, k, v, [channels, conv_kernel] or [channels, conv_kernel, 1].
        windows: the ``conv_kernel - 1`` tokens before, [B, conv_kernel - 1, channels] each.
        H, Hv: heads of q and k, and of v.
        lengths: [B] integers; tokens past a row's length output 0 and do not enter its window.
        runner: "metal", "emulator", "emulator-fast", "cuda" or "auto".

    Returns:
        ((q, k, v), windows): q, k [B, T, H, Dk] and v [B, T, Hv, Dv] in v's dtype.

    Raises:
        ValueError: a shape, dtype or size that does not fit, named.
    """
    B, T, _ = q.shape
    Dk, Dv = q.shape[-1] // H, v.shape[-1] // Hv
    width = check_conv(q, k, v, conv_weight, windows, (B, T, H * Dk, Hv * Dv))
    if Hv % H:
        raise ValueError(f"Hv (heads of v, {Hv}) must be a multiple of H (heads of q, {H})")
    ok, reason = supported(Dk, Dv, v.dtype, width)
    if not ok:
        raise ValueError(f"kda_prologue: {reason}")
    q, k, v, *windows = kernel("kda_prologue", runner)(
        inputs=[
            q,
            k,
            v,
            *windows,
            *conv_weight,
            lengths_or_full(lengths, B, T),
            integers((T, H, Hv)),
        ],
        template=[("InT", v.dtype), ("Dk", Dk), ("Dv", Dv), ("CONV_KERNEL", width)],
        grid=(96 * -(-T // TOKENS), B * Hv, 1),
        threadgroup=(96, 1, 1),
        output_shapes=[(B, T, H, Dk), (B, T, H, Dk), (B, T, Hv, Dv)]
        + [window.shape for window in windows],
        output_dtypes=[v.dtype] * 6,
    )
    return (q, k, v), tuple(windows)


def check_conv(q, k, v, conv_weight, windows, shape) -> int:
    """Check projections, weights and windows against (B, T, q channels, v channels); the length."""
    B, T, *channels = shape
    width = conv_weight[0].shape[1] if conv_weight[0].ndim > 1 else 0
    sizes = (channels[0], channels[0], channels[1])
    for name, x, window, w, size in zip("qkv", (q, k, v), windows, conv_weight, sizes, strict=True):
        check(name, x, (B, T, size))
        check(f"the window of {name}", window, (B, width - 1, size))
        if w.size != size * width:
            raise ValueError(
                f"conv_weight of {name} must be [{size}, {width}], got shape {w.shape}"
            )
    return width


def check(name: str, x: mx.array, shape: tuple[int, ...]) -> None:
    """A ValueError names the array whose shape is not the one that fits."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
