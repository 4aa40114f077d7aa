"""Short depthwise causal convolution with a window carried from step to step."""

import mlx.core as mx
import mlx.nn as nn

from ..ops.elementwise import silu
from .padding import Padding


class ShortConv(nn.Module):
    """``y_t = silu(sum_i w[:, i] * x_{t - taps + 1 + i})``, every channel on its own.

    The window holds the ``taps - 1`` inputs before the first token, zeros at the start of a text.
    """

    def __init__(self, channels: int, taps: int):
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, taps, groups=channels, bias=False)

    def __call__(
        self, x: mx.array, window: mx.array | None = None, padding: Padding | None = None
    ) -> tuple[mx.array, mx.array]:
        """See `short_conv`."""
        return short_conv(x, self.conv.weight, window, padding)


def short_conv(
    x: mx.array, weight: mx.array, window: mx.array | None, padding: Padding | None = None
) -> tuple[mx.array, mx.array]:
    """x [B, T, channels], weight [channels, taps, 1], window [B, taps - 1, channels] or None
    -> (y like x, the next window).

    With ``padding.window`` a row's window ends at its last real token.
    """
    B, T, C = x.shape
    taps = weight.shape[1]
    if window is None:
        window = mx.zeros((B, taps - 1, C), dtype=x.dtype)
    if T == 0:
        return x, window
    inputs = mx.concatenate([window, x], axis=1)
    if T == 1:
        y = (inputs * weight.squeeze(-1).T).sum(axis=1, keepdims=True)
    elif x.dtype == mx.float32 and mx.default_device() == mx.cpu:
        # MLX's convolution takes the CPU three to seven times as long.
        rows = mx.contiguous(weight.squeeze(-1).T)
        y = sum((inputs[:, i : i + T] * rows[i] for i in range(1, taps)), inputs[:, :T] * rows[0])
    else:
        y = mx.conv1d(inputs, weight, groups=C)
    y = silu(y.astype(x.dtype))
    if padding is not None and padding.window is not None:
        return y, mx.take_along_axis(inputs, padding.window, axis=1)
    window = inputs[:, T:]
    # A view would keep a whole prompt's inputs alive; for a few tokens it saves a copy.
    return y, mx.contiguous(window) if taps < T else window
