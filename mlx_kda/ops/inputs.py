"""The arguments of the op: declared once, checked once, then passed to every path."""

from typing import Any

import mlx.core as mx

from .elementwise import exp
from .gates import Gate

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


class CheckedInputs:
    """The arguments of one call of the op and their sizes B, T, H, Hv, Dk, Dv.

    Making one checks every shape and dtype against the others. The arguments are those of
    `kda_ref`. The kernels also take raw gates: with ``gate`` given, ``g`` is the raw gate
    a [B, T, Hv, Dk] in any float dtype, and by ``beta_kind`` ("given", "sigmoid", "twice")
    ``beta`` is the write strength, or the raw b of ``sigmoid(b)`` or ``2 sigmoid(b)``.

    Raises:
        ValueError: an argument that does not fit, by name.
    """

    def __init__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array | None,
        beta: mx.array,
        *,
        scale: float | None = None,
        state: mx.array | None = None,
        lengths: mx.array | None = None,
        delta_rule: bool = True,
        gate: Gate | None = None,
        beta_kind: str = "given",
    ):
        arrays = {"q": q, "k": k, "v": v, "beta": beta}
        given = {"g": g, "state": state, "lengths": lengths}
        arrays |= {name: x for name, x in given.items() if x is not None}
        for name, x in arrays.items():
            if not isinstance(x, mx.array):
                raise ValueError(f"{name} must be an mx.array, got {type(x).__name__}")
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 4:
                raise ValueError(f"{name} must be [B, T, heads, dim], got shape {x.shape}")
            if x.dtype not in _FLOATS:
                raise ValueError(f"{name} must be float32, float16 or bfloat16, got {x.dtype}")
        B, T, H, Dk = q.shape
        if Dk == 0:
            raise ValueError(f"q must have at least one key channel, got shape {q.shape}")
        Hv, Dv = v.shape[2:]
        check_shape("k", k, (B, T, H, Dk), "the shape of q")
        check_shape("v", v, (B, T, Hv, Dv), "[B, T, Hv, Dv] with the B and T of q")
        check_heads(H, Hv)
        if gate is not None:
            gate.check(Hv, Dk)
        self.gate_kind = check_decay((B, T, Hv, Dk), g, beta, gate)
        if state is not None:
            check_shape("state", state, (B, Hv, Dv, Dk), "[B, Hv, Dv, Dk]")
            if state.dtype != mx.float32:
                raise ValueError(f"state must be float32, got {state.dtype}")
        if lengths is not None:
            check_shape("lengths", lengths, (B,), "[B]")
            if not mx.issubdtype(lengths.dtype, mx.integer):
                raise ValueError(f"lengths must be integers, got {lengths.dtype}")
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.state, self.lengths, self.gate = state, lengths, gate
        self.scale = Dk**-0.5 if scale is None else float(scale)
        self.delta_rule, self.beta_kind = delta_rule, beta_kind
        self.B, self.T, self.H, self.Hv, self.Dk, self.Dv = B, T, H, Hv, Dk, Dv
        self.dtype = v.dtype

    def replace(self, **arrays: Any) -> "CheckedInputs":
        """The same call on other arrays; sizes are not read again."""
        other = object.__new__(CheckedInputs)
        other.__dict__.update(self.__dict__, **arrays)
        return other

    def initial_state(self) -> mx.array:
        """The state given, or zeros [B, Hv, Dv, Dk] float32."""
        if self.state is not None:
            return self.state
        return mx.zeros((self.B, self.Hv, self.Dv, self.Dk), dtype=mx.float32)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no tokens, no rows or no value channels."""
        return self.B * self.T * self.Dv == 0

    def empty_result(self) -> tuple[mx.array, mx.array]:
        """(o, state) of an empty call."""
        o = mx.zeros((self.B, self.T, self.Hv, self.Dv), dtype=self.dtype)
        return o, self.initial_state()


def check_shape(name: str, x: mx.array, shape: tuple[int, ...], what: str) -> None:
    """Raise a ValueError that says ``what`` the shape of the array called ``name`` must be."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must be {what} = {shape}, got shape {tuple(x.shape)}")


def check_heads(H: int, Hv: int) -> None:
    if H == 0 or Hv == 0 or Hv % H:
        raise ValueError(f"Hv (heads of v, {Hv}) must be a multiple of H (heads of q, {H})")


def check_decay(
    shape: tuple[int, int, int, int], g: mx.array | None, beta: mx.array, gate: Gate | None
) -> str:
    """Check gate and write strength against shape = (B, T, Hv, Dk).

    Returns:
        "none", "head" or "channel" for log decays, "softplus" or "bounded" for a raw gate.
    """
    if tuple(beta.shape) != shape[:3]:
        raise ValueError(f"beta must be [B, T, Hv] = {shape[:3]}, got shape {beta.shape}")
    if gate is not None:
        if g is None or tuple(g.shape) != shape:
            got = None if g is None else tuple(g.shape)
            raise ValueError(f"a raw gate must be [B, T, Hv, Dk] = {shape}, got shape {got}")
        return "softplus" if gate.lower_bound is None else "bounded"
    if g is None:
        return "none"
    if tuple(g.shape) not in (shape, shape[:3]):
        raise ValueError(
            f"g must be [B, T, Hv, Dk] = {shape} (per channel) or "
            f"[B, T, Hv] = {shape[:3]} (per head), got shape {g.shape}"
        )
    if g.dtype != mx.float32:
        raise ValueError(f"g must be float32 (log decays do not fit {g.dtype})")
    return "channel" if g.ndim == 4 else "head"


def prepare(
    scale: float | mx.array,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array | None,
    beta: mx.array,
) -> tuple[mx.array, mx.array, mx.array, mx.array | None, mx.array]:
    """float32 (scale * q, k, v, a, beta), each [B, T, Hv, .], beta 1 wide; a = exp(g) or None."""
    H, Hv = q.shape[2], v.shape[2]
    q, k, v, beta = (x.astype(mx.float32) for x in (q, k, v, beta[..., None]))
    q = q * scale
    if Hv > H:
        q, k = (mx.repeat(x, Hv // H, axis=2) for x in (q, k))
    if g is None:
        return q, k, v, None, beta
    return q, k, v, exp(g if g.ndim == 4 else g[..., None]), beta


def keep_inside(
    lengths: mx.array | None, t: int, old: mx.array, new: mx.array, o: mx.array
) -> tuple[mx.array, mx.array]:
    """(state, output) after token t: rows that ended before t keep the old state and output 0."""
    if lengths is None:
        return new, o
    inside = (t < lengths)[:, None, None, None]
    return mx.where(inside, new, old), mx.where(inside, o, 0.0)
