"""The float64 oracle, token by token, and the inputs on which wrong kernels look right or do not.

Nothing here calls the package under test: the recurrence is written once more in numpy.
"""

from dataclasses import dataclass, replace

import numpy as np

# The five rows of the numerics table: name -> what is hard about it.
ROWS = {
    "random": "random keys, mild gates",
    "repeated": "one key repeated, slow decay, beta near 1",
    "collinear": "keys 95 % collinear, beta .98",
    "deep": "gates down to -50 a token",
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
        return self.q, self.k, self.v, self.g, self.beta

    def slice(self, start: int, stop: int) -> "Inputs":
        """Tokens start..stop, without the state."""
        cut = [None if x is None else x[:, start:stop] for x in self.arrays()]
        return Inputs(*cut)

    def with_state(self, seed: int = 1) -> "Inputs":
        rng = np.random.default_rng(seed)
        B, _, Hv, Dv = self.v.shape
        state = rng.standard_normal((B, Hv, Dv, self.k.shape[-1])).astype(np.float32)
        return replace(self, state=state)


def make(row, T=256, B=1, H=2, Hv=None, Dk=128, Dv=128, seed=0) -> Inputs:
    """Inputs of one row of ROWS, keys and queries of unit length, float32."""
    rng = np.random.default_rng(seed)
    Hv = Hv or H
    unit = lambda x: x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    q = rng.standard_normal((B, T, H, Dk))
    k = rng.standard_normal((B, T, H, Dk))
    v = rng.standard_normal((B, T, Hv, Dv))
    u = rng.random((B, T, Hv, Dk))
    beta = sigmoid(rng.standard_normal((B, T, Hv)))
    if row == "random":
        g = -0.2 * u
    elif row == "repeated":
        k = np.broadcast_to(k[:, :1], k.shape)
        q = k
        beta = np.full_like(beta, sigmoid(8.0))
        g = np.full(u.shape, -5 * sigmoid(-12.0))
    elif row == "collinear":
        k = 0.95 * unit(np.broadcast_to(k[:, :1], k.shape)) + 0.05 * unit(k)
        beta = np.full_like(beta, 0.98)
        g = -1e-3 * u
    elif row == "deep":
        g = -50 * u**2
    elif row == "mixed":
        g = -(10.0 ** (-4 + u * (4 + np.log10(50.0))))
    else:
        raise KeyError(row)
    q, k = unit(q), unit(k)
    return Inputs(*(np.ascontiguousarray(x, dtype=np.float32) for x in (q, k, v, g, beta)))


def recurrence(
    q, k, v, g, beta, scale=None, state=None, lengths=None, erase=True, dtype=np.float64
):
    """o [B,T,Hv,Dv], state [B,Hv,Dv,Dk] by the textbook loop in ``dtype`` (float64: the oracle)."""
    q, k, v, beta = (np.asarray(x, dtype) for x in (q, k, v, beta))
    B, T, H, Dk = q.shape
    Hv, Dv = v.shape[2:]
    scale = dtype(Dk**-0.5 if scale is None else scale)
    q, k = (np.repeat(x, Hv // H, axis=2) for x in (q * scale, k))
    decay = np.ones((B, T, Hv, 1), dtype) if g is None else np.exp(np.asarray(g, dtype))
    if decay.ndim == 3:
        decay = decay[..., None]
    S = np.zeros((B, Hv, Dv, Dk), dtype) if state is None else np.array(state, dtype)
    o = np.zeros((B, T, Hv, Dv), dtype)
    for b in range(B):
        for t in range(T if lengths is None else min(T, int(lengths[b]))):
            Sb = S[b] * decay[b, t][:, None, :]
            predicted = np.einsum("hvk,hk->hv", Sb, k[b, t]) if erase else dtype(0)
            error = beta[b, t][:, None] * (v[b, t] - predicted)
            Sb = Sb + error[:, :, None] * k[b, t][:, None, :]
            o[b, t] = np.einsum("hvk,hk->hv", Sb, q[b, t])
            S[b] = Sb
    return o, S


def error(x, truth) -> float:
    """Norm of the difference over the norm of the truth; infinite where x is not finite."""
    x, truth = np.asarray(x, np.float64), np.asarray(truth, np.float64)
    if not np.isfinite(x).all():
        return float("inf")
    return float(np.linalg.norm(x - truth) / max(np.linalg.norm(truth), 1e-30))
