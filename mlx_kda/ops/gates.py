"""From a layer's raw projections to what the recurrence takes: log decays and unit keys.

Log decays stay float32 whatever the activations are: rounding ``exp(-8e-5)`` to bfloat16 gives
exactly 1 and the memory would never fade.
"""

import mlx.core as mx

from .elementwise import sigmoid, softplus


def softplus_gate(a: mx.array, A_log: mx.array, dt_bias: mx.array) -> mx.array:
    """Unbounded gate of Kimi Linear: ``g = -exp(A_log[h]) * softplus(a + dt_bias)``.

    Args:
        a: raw gate, [..., H, Dk], any float dtype.
        A_log: one number a head, H values in any shape.
        dt_bias: one number a channel, H * Dk values ([H, Dk] or flat).

    Returns:
        Natural-log decay g <= 0, float32, the shape of ``a``.

    Raises:
        ValueError: A_log or dt_bias does not hold H or H * Dk values.
    """
    rate, bias = _parameters(a, A_log, dt_bias)
    return -rate * softplus(a.astype(mx.float32) + bias)


def bounded_gate(a: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float) -> mx.array:
    """Bounded gate: ``g = lower_bound * sigmoid(exp(A_log[h]) * (a + dt_bias))``.

    Args:
        a: raw gate, [..., H, Dk], any float dtype.
        A_log: one number a head, H values in any shape.
        dt_bias: one number a channel, H * Dk values ([H, Dk] or flat).
        lower_bound: the least log decay a token, negative (-5 in released models).

    Returns:
        Natural-log decay in (lower_bound, 0), float32, the shape of ``a``.

    Raises:
        ValueError: a parameter of the wrong size, or a bound that is not negative.
    """
    if not lower_bound < 0:
        raise ValueError(f"lower_bound must be negative (a log decay), got {lower_bound}")
    rate, bias = _parameters(a, A_log, dt_bias)
    return lower_bound * sigmoid(rate * (a.astype(mx.float32) + bias))


def l2norm(x: mx.array, eps: float = 1e-6) -> mx.array:
    """Unit vectors along the last axis: ``x / sqrt(sum(x^2) + eps)``; eps is on the sum.

    float32 inside, the dtype of ``x`` outside; a row of zeros stays zero.
    """
    x32 = x.astype(mx.float32)
    norm = mx.rsqrt((x32 * x32).sum(axis=-1, keepdims=True) + eps)
    return (x32 * norm).astype(x.dtype)


def _parameters(a: mx.array, A_log: mx.array, dt_bias: mx.array) -> tuple[mx.array, mx.array]:
    """exp(A_log) as [H, 1] and dt_bias as [H, Dk], float32, or a ValueError naming the shape."""
    if a.ndim < 2:
        raise ValueError(f"a must end in [H, Dk], got shape {a.shape}")
    H, Dk = a.shape[-2:]
    if A_log.size != H:
        raise ValueError(f"A_log must hold one value a head (H={H}), got shape {A_log.shape}")
    if dt_bias.size != H * Dk or dt_bias.shape[-1] not in (Dk, H * Dk):
        raise ValueError(
            f"dt_bias must hold one value a channel ([H={H}, Dk={Dk}] or flat), "
            f"got shape {dt_bias.shape}"
        )
    rate = mx.exp(A_log.astype(mx.float32)).reshape(H, 1)
    return rate, dt_bias.astype(mx.float32).reshape(H, Dk)
