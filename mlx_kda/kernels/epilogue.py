"""Wrapper of metal/kda_epilogue.metal: the gated output norm after a prefill."""

import mlx.core as mx

from .arguments import LayerParameters, floats, integers, lengths_or_full
from .sources import kernel

ROWS = 4


def kda_epilogue(
    o: mx.array,
    z: mx.array,
    w: LayerParameters,
    *,
    lengths: mx.array | None = None,
    runner: str = "auto",
) -> mx.array:
    """``y = o / sqrt(mean o^2 + eps) * norm_weight * sigmoid(z)``, a head at a time.

    Args:
        o, z: [B, T, Hv, Dv], T >= 1: outputs of the recurrence, and the raw output gate.
        w: the layer's parameters, that `kda_prologue` checked.
        lengths: [B] integers; tokens past a row's length output 0.
        runner: "metal", "emulator", "emulator-fast", "cuda" or "auto".

    Returns:
        y [B, T, Hv, Dv] in o's dtype, rounded once.
    """
    B, T, Hv, Dv = o.shape
    rows = B * T * Hv
    (y,) = kernel("kda_epilogue", runner)(
        inputs=[
            *(o, z, w.norm_weight, lengths_or_full(lengths, B, T)),
            *(integers((T, Hv, rows)), floats((float(w.eps),))),
        ],
        template=[("InT", o.dtype), ("Dv", Dv)],
        grid=(32, ROWS * -(-rows // ROWS), 1),
        threadgroup=(32, ROWS, 1),
        output_shapes=[o.shape],
        output_dtypes=[o.dtype],
    )
    return y
