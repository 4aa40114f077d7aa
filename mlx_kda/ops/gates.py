"""From a layer's raw projections to what the recurrence takes: log decays and unit keys.

Log decays stay float32 whatever the activations are: rounding ``exp(-8e-5)`` to bfloat16 gives
exactly 1 and the state would never decay.
"""

from dataclasses import dataclass

import mlx.core as mx

from .elementwise import sigmoid, softplus


@dataclass(frozen=True, eq=False)
class Gate:
    """A layer's gate: how raw values a [..., H, Dk] become log decays.

    ``g = -exp(A_log) softplus(a + dt_bias)``, or with a ``lower_bound`` (negative)
    ``g = lower_bound sigmoid(exp(A_log) (a + dt_bias))``. ``A_log`` holds one value per head and
    ``dt_bias`` one per channel, [H, Dk] or flat.
    """

    A_log: mx.array
    dt_bias: mx.array
    lower_bound: float | None = None

    def check(self, H: int, Dk: int) -> None:
        """Raise a ValueError that names the parameter that does not fit H heads of Dk channels."""
        if self.A_log.size != H:
            raise ValueError(
                f"A_log must hold one value per head (H={H}), got shape {self.A_log.shape}"
            )
        if self.dt_bias.size != H * Dk or self.dt_bias.shape[-1] not in (Dk, H * Dk):
            raise ValueError(
                f"dt_bias must hold one value per channel ([H={H}, Dk={Dk}] or flat), "
                f"got shape {self.dt_bias.shape}"
            )
        if self.lower_bound is not None and not self.lower_bound < 0:
            raise ValueError(f"lower_bound must be negative (a log decay), got {self.lower_bound}")

    def log_decay(self, a: mx.array) -> mx.array:
        """g <= 0, float32, the shape of ``a`` [..., H, Dk]."""
        if a.ndim < 2:
            raise ValueError(f"a must end in [H, Dk], got shape {a.shape}")
        H, Dk = a.shape[-2:]
        self.check(H, Dk)
        rate = mx.exp(self.A_log.astype(mx.float32)).reshape(H, 1)
        a = a.astype(mx.float32) + self.dt_bias.astype(mx.float32).reshape(H, Dk)
        if self.lower_bound is None:
            return -rate * softplus(a)
        return self.lower_bound * sigmoid(rate * a)


def softplus_gate(a: mx.array, A_log: mx.array, dt_bias: mx.array) -> mx.array:
    """Unbounded gate of Kimi Linear: ``g = -exp(A_log[h]) * softplus(a + dt_bias)``.

    Args:
        a: raw gate, [..., H, Dk], any float dtype.
        A_log: one value per head, H values in any shape.
        dt_bias: one value per channel, H * Dk values ([H, Dk] or flat).

    Returns:
        Natural-log decay g <= 0, float32, the shape of ``a``.

    Raises:
        ValueError: A_log or dt_bias does not hold H or H * Dk values.
    """
    return Gate(A_log, dt_bias).log_decay(a)


def bounded_gate(a: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float) -> mx.array:
    """Bounded gate: ``g = lower_bound * sigmoid(exp(A_log[h]) * (a + dt_bias))``.

    Args:
        a, A_log, dt_bias: as for `softplus_gate`.
        lower_bound: the least log decay per token, negative (-5 in released models).

    Returns:
        Natural-log decay in (lower_bound, 0), float32, the shape of ``a``.

    Raises:
        ValueError: a parameter of the wrong size, or a bound that is not negative.
    """
    return Gate(A_log, dt_bias, lower_bound).log_decay(a)


def write_strength(b: mx.array, kind: str) -> mx.array:
    """beta of b: b itself ("given"), ``sigmoid(b)`` ("sigmoid") or ``2 sigmoid(b)`` ("twice")."""
    if kind == "given":
        return b
    beta = mx.sigmoid(b.astype(mx.float32))
    return 2 * beta if kind == "twice" else beta


def l2norm(x: mx.array, eps: float = 1e-6) -> mx.array:
    """Unit vectors along the last axis: ``x / sqrt(sum(x^2) + eps)``; eps is on the sum.

    float32 inside, the dtype of ``x`` outside; a row of zeros stays zero.
    """
    x32 = x.astype(mx.float32)
    norm = mx.rsqrt((x32 * x32).sum(axis=-1, keepdims=True) + eps)
    return (x32 * norm).astype(x.dtype)
