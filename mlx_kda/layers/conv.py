"""Short depthwise causal convolution with a window carried from step to step."""

import mlx.core as mx
import mlx.nn as nn

from ..ops.elementwise import silu
from .padding import Padding


class ShortConv(nn.Module):
    """``y_t = silu(sum_i w[:, i] * x_{t - conv_kernel + 1 + i})``, every channel on its own.

    The window holds the ``conv_kernel - 1`` inputs before the first token, zeros at the start of a
    sequence.
    """

    def __init__(self, channels: int, conv_kernel: int):
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, conv_kernel, groups=channels, bias=False)

    def __call__(
        self, x: mx.array, window: mx.array | None = None, padding: Padding | None = None
    ) -> tuple[mx.array, mx.array]:
        """See `short_conv`."""
        return short_conv(x, self.conv.weight, window, padding)


def short_conv(
    x: mx.array, weight: mx.array, window: mx.array | None, padding: Padding | None = None
) -> tuple[mx.array, mx.array]:
    """x [B, T, C], weight [C, conv_kernel, 1], window [B, conv_kernel - 1, C] or None
    -> (y like x, the next window).

    With ``padding.window`` a row's window ends at its last real token.
    """
    B, T, C = x.shape
    conv_kernel = weight.shape[1]
    if window is None:
        window = mx.zeros((B, conv_kernel - 1, C), dtype=x.dtype)
    if T == 0:
        return x, window
    inputs = mx.concatenate([window, x], axis=1)
    if T == 1:
        y = (inputs * weight.squeeze(-1).T).sum(axis=1, keepdims=True)
    elif x.dtype == mx.float32 and mx.default_device() == mx.cpu:
        # MLX's convolution takes the CPU three to seven times as long.
        rows = mx.contiguous(weight.squeeze(-1).T)
        y = inputs[:, :T] * rows[0]
        for i in range(1, conv_kernel):
            y = y + inputs[:, i : i + T] * rows[i]
    else:
        y = mx.conv1d(inputs, weight, groups=C)
    y = silu(y.astype(x.dtype))
    if padding is not None and padding.window is not None:
        return y, mx.take_along_axis(inputs, padding.window, axis=1)
    window = inputs[:, T:]
    # A view would keep all inputs of a prompt in memory; for a few tokens it saves a copy.
    return y, mx.contiguous(window) if conv_kernel < T else window
