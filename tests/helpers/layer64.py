"""A KDA layer between its projections, in float64: what the fused kernels are judged by."""

from dataclasses import dataclass

import numpy as np

from mlx_kda.ops import reference64 as oracle


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@dataclass
class Layer:
    """Projections and parameters of one step, in float64 but representable in the run's dtype."""

    q: np.ndarray  # [B, T, H * Dk]
    k: np.ndarray
    v: np.ndarray  # [B, T, Hv * Dv]
    a: np.ndarray  # [B, T, Hv, Dk]
    b: np.ndarray  # [B, T, Hv]
    z: np.ndarray  # [B, T, Hv, Dv]
    conv_weight: tuple  # of q, k, v: [channels, conv_kernel]
    windows: tuple
    A_log: np.ndarray
    dt_bias: np.ndarray
    weight: np.ndarray
    state: np.ndarray
    H: int
    lower_bound: float | None = None
    beta_kind: str = "sigmoid"
    eps: float = 1e-5

    def gate(self):
        a = self.a + self.dt_bias.reshape(self.a.shape[-2:])
        rate = np.exp(self.A_log)[:, None]
        if self.lower_bound is None:
            return -rate * np.logaddexp(a, 0)
        return self.lower_bound * sigmoid(rate * a)

    def beta(self):
        return {"sigmoid": 1, "twice": 2}[self.beta_kind] * sigmoid(self.b)

    def mixed(self):
        """(q, k, v) [B, T, heads, dim] after convolution, SiLU and norms."""
        B, T, Hv = self.b.shape
        out = []
        for x, w, window in zip(
            (self.q, self.k, self.v), self.conv_weight, self.windows, strict=True
        ):
            both = np.concatenate([window, x], axis=1)
            y = sum(both[:, j : j + T] * w[:, j] for j in range(w.shape[1]))
            out.append(y * sigmoid(y))
        q, k = (x.reshape(B, T, self.H, -1) for x in out[:2])
        q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        return q, k, out[2].reshape(B, T, Hv, -1)

    def run(self, lengths=None):
        """(y, state, windows): rows past a length output 0 and change nothing."""
        B, T = self.b.shape[:2]
        o, state = oracle.recurrence(
            *self.mixed(), self.gate(), self.beta(), state=self.state, lengths=lengths
        )
        y = o / np.sqrt((o**2).mean(-1, keepdims=True) + self.eps) * self.weight * sigmoid(self.z)
        ends = [T] * B if lengths is None else [min(T, max(0, int(n))) for n in lengths]
        for b, end in enumerate(ends):
            y[b, end:] = 0
        windows = []
        for x, window in zip((self.q, self.k, self.v), self.windows, strict=True):
            both = np.concatenate([window, x], axis=1)
            keep = window.shape[1]
            windows.append(np.stack([both[b, end : end + keep] for b, end in enumerate(ends)]))
        return y, state, windows


def make(
    B=2, T=3, H=2, Hv=None, Dk=64, Dv=32, conv_kernel=4, lower_bound=None, beta_kind="sigmoid",
    seed=0, rounded=lambda x: x,
) -> Layer:  # fmt: skip
    """A layer whose errors show: dt_bias over the range of real models, strong convolutions."""
    rng = np.random.default_rng(seed)
    Hv = Hv or H

    def normal(*shape, scale=1.0):
        return rounded((scale * rng.standard_normal(shape)).astype(np.float32)).astype(np.float64)

    sizes = (H * Dk, H * Dk, Hv * Dv)
    return Layer(
        *(normal(B, T, n) for n in sizes),
        normal(B, T, Hv, Dk),
        normal(B, T, Hv),
        normal(B, T, Hv, Dv),
        tuple(normal(n, conv_kernel) for n in sizes),
        tuple(normal(B, conv_kernel - 1, n) for n in sizes),
        rng.uniform(0, 2.7, Hv).astype(np.float32).astype(np.float64),
        rng.uniform(-6, 2, (Hv, Dk)).astype(np.float32).astype(np.float64),
        1 + normal(Dv, scale=0.1),
        0.3 * normal(B, Hv, Dv, Dk),
        H,
        lower_bound,
        beta_kind,
    )
