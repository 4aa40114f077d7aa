"""The recurrence in NumPy and float64, and hard inputs, to judge every other path by.

Nothing here uses MLX or the rest of the package, so that no path shares a line with its reference.
"""

from dataclasses import dataclass, replace

import numpy as np

# name -> what is hard about it
ROWS = {
    "random": "random keys, mild gates",
    "repeated": "one key repeated, slow decay, beta near 1",
    "collinear": "keys 95 % collinear, beta .98",
    "deep": "gates down to -50 per token",
    "mixed": "gates from -1e-4 to -50, mixed over channels and tokens",
}
UNCORRELATED = ("random", "deep", "mixed")
CORRELATED = ("repeated", "collinear")


@dataclass(frozen=True)
class Inputs:
    """float32 inputs of one call; q, k [B,T,H,Dk], v [B,T,Hv,Dv], g [B,T,Hv,Dk], beta [B,T,Hv]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray | None
    beta: np.ndarray
    state: np.ndarray | None = None

    def arrays(self) -> tuple[np.ndarray | None, ...]:
        """q, k, v, g, beta: what every path takes in this order."""
        return self.q, self.k, self.v, self.g, self.beta

    def slice(self, start: int, stop: int) -> "Inputs":
        """Tokens start..stop, without the state."""
        g = None if self.g is None else self.g[:, start:stop]
        q, k, v, beta = (x[:, start:stop] for x in (self.q, self.k, self.v, self.beta))
        return Inputs(q, k, v, g, beta)

    def with_state(self, seed: int = 1) -> "Inputs":
        """The same inputs with a random state [B, Hv, Dv, Dk] to start from."""
        B, _, Hv, Dv = self.v.shape
        state = np.random.default_rng(seed).standard_normal((B, Hv, Dv, self.k.shape[-1]))
        return replace(self, state=state.astype(np.float32))


def make(
    row: str,
    T: int = 256,
    B: int = 1,
    H: int = 2,
    Hv: int | None = None,
    Dk: int = 128,
    Dv: int = 128,
    seed: int = 0,
) -> Inputs:
    """Inputs of one row of ROWS, keys and queries of unit length, float32."""
    rng = np.random.default_rng(seed)
    Hv = Hv or H
    q = rng.standard_normal((B, T, H, Dk))
    k = rng.standard_normal((B, T, H, Dk))
    v = rng.standard_normal((B, T, Hv, Dv))
    u = rng.random((B, T, Hv, Dk))
    beta = _sigmoid(rng.standard_normal((B, T, Hv)))
    if row == "random":
        g = -0.2 * u
    elif row == "repeated":
        q = k = np.broadcast_to(k[:, :1], k.shape)
        beta = np.full_like(beta, _sigmoid(8.0))
        g = np.full(u.shape, -5 * _sigmoid(-12.0))
    elif row == "collinear":
        k = 0.95 * _unit(np.broadcast_to(k[:, :1], k.shape)) + 0.05 * _unit(k)
        beta = np.full_like(beta, 0.98)
        g = -1e-3 * u
    elif row == "deep":
        g = -50 * u**2
    elif row == "mixed":
        g = -(10.0 ** (-4 + u * (4 + np.log10(50.0))))
    else:
        raise KeyError(row)
    arrays = _unit(q), _unit(k), v, g, beta
    return Inputs(*(np.ascontiguousarray(x, dtype=np.float32) for x in arrays))


def recurrence(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray | None,
    beta: np.ndarray,
    scale: float | None = None,
    state: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    delta_rule: bool = True,
    dtype: type[np.floating] = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """o [B,T,Hv,Dv], state [B,Hv,Dv,Dk] by the textbook loop in ``dtype`` (float64: the oracle)."""
    q, k, v, beta = (np.asarray(x, dtype) for x in (q, k, v, beta))
    B, T, H, Dk = q.shape
    Hv, Dv = v.shape[2:]
    q = q * dtype(Dk**-0.5 if scale is None else scale)
    q, k = (np.repeat(x, Hv // H, axis=2) for x in (q, k))
    decay = np.ones((B, T, Hv, 1), dtype) if g is None else np.exp(np.asarray(g, dtype))
    if decay.ndim == 3:
        decay = decay[..., None]
    S = np.zeros((B, Hv, Dv, Dk), dtype) if state is None else np.array(state, dtype)
    o = np.zeros((B, T, Hv, Dv), dtype)
    for b in range(B):
        for t in range(T if lengths is None else min(T, int(lengths[b]))):
            Sb = S[b] * decay[b, t][:, None, :]
            predicted = np.einsum("hvk,hk->hv", Sb, k[b, t]) if delta_rule else dtype(0)
            e = beta[b, t][:, None] * (v[b, t] - predicted)
            Sb = Sb + e[:, :, None] * k[b, t][:, None, :]
            o[b, t] = np.einsum("hvk,hk->hv", Sb, q[b, t])
            S[b] = Sb
    return o, S


def error(x: np.ndarray, truth: np.ndarray) -> float:
    """Norm of the difference over the norm of the truth; infinite where x is not finite."""
    x, truth = np.asarray(x, np.float64), np.asarray(truth, np.float64)
    if not np.isfinite(x).all():
        return float("inf")
    return float(np.linalg.norm(x - truth)) / max(float(np.linalg.norm(truth)), 1e-30)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def _sigmoid(x: np.ndarray | float) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))
