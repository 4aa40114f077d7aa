"""The shapes of one call: read once, checked once, shared by every path."""

from dataclasses import dataclass

import mlx.core as mx

from .elementwise import exp

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Problem:
    """Shapes and options of one call of the op."""

    B: int
    T: int
    H: int
    Hv: int
    Dk: int
    Dv: int
    gate: str  # "channel" (KDA), "head" (Gated DeltaNet) or "none" (DeltaNet)
    delta_rule: bool
    scale: float
    dtype: mx.Dtype

    @classmethod
    def read(
        cls,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array | None,
        beta: mx.array,
        scale: float | None = None,
        state: mx.array | None = None,
        lengths: mx.array | None = None,
        delta_rule: bool = True,
    ) -> "Problem":
        """Check every shape against the others; a ValueError names the one that is off."""
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
        _same("k", k, (B, T, H, Dk), "the shape of q")
        _same("v", v, (B, T, Hv, Dv), "[B, T, Hv, Dv] with the B and T of q")
        if H == 0 or Hv == 0 or Hv % H:
            raise ValueError(f"Hv (heads of v, {Hv}) must be a multiple of H (heads of q, {H})")
        _same("beta", beta, (B, T, Hv), "[B, T, Hv]")
        gate = "none"
        if g is not None:
            if g.shape == (B, T, Hv, Dk):
                gate = "channel"
            elif g.shape == (B, T, Hv):
                gate = "head"
            else:
                raise ValueError(
                    f"g must be [B, T, Hv, Dk] = {(B, T, Hv, Dk)} (per channel) or "
                    f"[B, T, Hv] = {(B, T, Hv)} (per head), got shape {g.shape}"
                )
            if g.dtype != mx.float32:
                raise ValueError(f"g must be float32 (log decays do not fit {g.dtype})")
        if state is not None:
            _same("state", state, (B, Hv, Dv, Dk), "[B, Hv, Dv, Dk]")
            if state.dtype != mx.float32:
                raise ValueError(f"state must be float32, got {state.dtype}")
        if lengths is not None:
            _same("lengths", lengths, (B,), "[B]")
            if not mx.issubdtype(lengths.dtype, mx.integer):
                raise ValueError(f"lengths must be integers, got {lengths.dtype}")
        scale = Dk**-0.5 if scale is None else float(scale)
        return cls(B, T, H, Hv, Dk, Dv, gate, delta_rule, scale, v.dtype)

    def initial_state(self, state: mx.array | None) -> mx.array:
        """The state given, or zeros [B, Hv, Dv, Dk] float32."""
        if state is not None:
            return state
        return mx.zeros((self.B, self.Hv, self.Dv, self.Dk), dtype=mx.float32)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no tokens, no rows or no value channels."""
        return self.B * self.T * self.Dv == 0

    def no_output(self) -> mx.array:
        """The output of an empty call."""
        return mx.zeros((self.B, self.T, self.Hv, self.Dv), dtype=self.dtype)


def _same(name: str, x: mx.array, shape: tuple[int, ...], what: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must be {what} = {shape}, got shape {tuple(x.shape)}")


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
