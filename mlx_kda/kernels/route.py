"""Wrapper of metal/moe_route.metal: a mixture of experts' choice in one launch."""

import mlx.core as mx

from .arguments import floats, in_device_memory
from .sources import kernel

MAX_EXPERTS = 1024
MAX_CHOSEN = 32


def supported(experts: int, top_k: int, groups: int = 1) -> tuple[bool, str]:
    """(True, why) where `moe_route` can run, (False, why not) elsewhere."""
    if experts > MAX_EXPERTS:
        return False, f"{experts} experts: the kernel takes up to {MAX_EXPERTS}"
    if top_k > min(experts, MAX_CHOSEN):
        return False, f"{top_k} experts chosen: the kernel takes up to {MAX_CHOSEN}"
    if groups > 32 or experts % groups:
        return (
            False,
            f"{experts} experts in {groups} groups: the kernel takes up to 32 equal groups",
        )
    return True, "the router has a kernel"


def moe_route(
    logits: mx.array,
    bias: mx.array,
    *,
    top_k: int,
    groups: int = 1,
    kept_groups: int = 1,
    activation: str = "sigmoid",
    renormalize: bool = True,
    scale: float = 1.0,
    dtype: mx.Dtype = mx.float32,
    runner: str = "auto",
) -> tuple[mx.array, mx.array]:
    """What `layers.moe.route` computes, highest choice first.

    Args:
        logits: float32 [..., experts].
        bias: float32 [experts]; it moves the choice, never the weight.
        dtype: of the weights that come out.
        runner: "metal", "emulator", "emulator-fast", "cuda" or "auto".

    Returns:
        (experts chosen uint32 [..., top_k], weights [..., top_k]).

    Raises:
        ValueError: sizes that have no kernel, or shapes and dtypes that do not fit.
    """
    *before, E = logits.shape
    ok, reason = supported(E, top_k, groups)
    if not ok:
        raise ValueError(f"moe_route: {reason}")
    for name, x, shape in (("logits", logits, (*before, E)), ("bias", bias, (E,))):
        if tuple(x.shape) != shape or x.dtype != mx.float32:
            raise ValueError(f"{name} must be float32 {list(shape)}, got {x.dtype} {x.shape}")
    if activation not in ("sigmoid", "softmax"):
        raise ValueError(f"router activation must be 'sigmoid' or 'softmax', got {activation!r}")
    tokens = logits.size // E
    shape = (*before, top_k)
    if tokens == 0:
        return mx.zeros(shape, dtype=mx.uint32), mx.zeros(shape, dtype=dtype)
    chosen, weights = kernel("moe_route", runner)(
        inputs=[*in_device_memory(logits, bias), floats((float(scale),))],
        template=[
            ("E", E),
            ("K", top_k),
            ("GROUPS", groups),
            ("KEPT", kept_groups),
            ("SOFTMAX", activation == "softmax"),
            ("NORM", renormalize),
            ("OutT", dtype),
        ],
        grid=(32, tokens, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[shape, shape],
        output_dtypes=[mx.uint32, dtype],
    )
    return chosen, weights
