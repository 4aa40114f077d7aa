"""Wrapper of metal/kda_epilogue.metal: the gated output norm after a prefill."""

import mlx.core as mx

from .arguments import floats, integers, lengths_or_full
from .arguments import supported as _dims_supported
from .prologue import check
from .sources import kernel

ROWS = 4


def supported(Dv: int, dtype: mx.Dtype) -> tuple[bool, str]:
    """(True, why) where `kda_epilogue` can run, (False, why not) elsewhere."""
    return _dims_supported(32, Dv, dtype)


def kda_epilogue(
    o: mx.array,
    z: mx.array,
    weight: mx.array,
    eps: float,
    *,
    lengths: mx.array | None = None,
    runner: str = "auto",
) -> mx.array:
    """``y = o / sqrt(mean o^2 + eps) * weight * sigmoid(z)``, a head at a time.

    Args:
        o, z: [B, T, Hv, Dv], T >= 1: outputs of the recurrence, and the raw output gate.
        weight: [Dv].
        eps: added to the mean.
        lengths: [B] integers; tokens past a row's length output 0.
        runner: "metal", "emulator", "emulator-fast", "cuda" or "auto".

    Returns:
        y [B, T, Hv, Dv] in o's dtype, rounded once.

    Raises:
        ValueError: a shape, dtype or size that does not fit, named.
    """
    B, T, Hv, Dv = o.shape
    check("z", z, o.shape)
    if weight.size != Dv:
        raise ValueError(f"weight must be [Dv] = {(Dv,)}, got shape {weight.shape}")
    ok, reason = supported(Dv, o.dtype)
    if not ok:
        raise ValueError(f"kda_epilogue: {reason}")
    rows = B * T * Hv
    (y,) = kernel("kda_epilogue", runner)(
        inputs=[
            *(o, z, weight, lengths_or_full(lengths, B, T)),
            *(integers((T, Hv, rows)), floats((float(eps),))),
        ],
        template=[("InT", o.dtype), ("Dv", Dv)],
        grid=(32, ROWS * -(-rows // ROWS), 1),
        threadgroup=(32, ROWS, 1),
        output_shapes=[o.shape],
        output_dtypes=[o.dtype],
    )
    return y
