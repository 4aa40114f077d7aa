"""Which tokens of a padded batch are real, computed once per forward pass for all KDA layers."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class Padding:
    """Padding of the T tokens of a call.

    lengths: int32 [B], where the real tokens end (right padding), or None.
    window: int32 [B, conv_kernel - 1, 1], the rows of (old window + tokens) that the next step's
        convolution needs when rows end early, or None.
    real: bool [B, T, 1], False before a row begins (left padding), or None. A row's state is
        empty until it begins, so zeroed inputs there write and read nothing.
    """

    lengths: mx.array | None = None
    window: mx.array | None = None
    real: mx.array | None = None

    @classmethod
    def of(cls, cache: Any, T: int, conv_kernel: int) -> "Padding | None":
        """From the ``lengths`` and ``left_padding`` of an mlx-lm ArraysCache; None: no padding."""
        ends = getattr(cache, "lengths", None)
        begins = getattr(cache, "left_padding", None)
        if ends is None and begins is None:
            return None
        lengths = window = real = None
        if ends is not None:
            lengths = mx.clip(ends, 0, T).astype(mx.int32)
            window = (lengths[:, None] + mx.arange(conv_kernel - 1))[..., None]
        if begins is not None:
            real = (mx.arange(T) >= begins[:, None])[..., None]
        return cls(lengths, window, real)
