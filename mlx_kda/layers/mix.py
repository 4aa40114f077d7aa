"""A KDA layer between its projections, by MLX operations; `kernels.layer` does it by kernels."""

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from ..attention import kda
from ..kernels.arguments import Gate
from ..kernels.layer import Parameters
from ..ops import bounded_gate, l2norm, softplus_gate
from ..ops.elementwise import gated
from .conv import short_conv
from .norm import rms_norm
from .padding import Padding


class Projections(NamedTuple):
    """Everything the layer computes from x alone, before any of it meets the past."""

    q: mx.array  # [B, T, H * Dk], before the convolution
    k: mx.array
    v: mx.array  # [B, T, Hv * Dv]
    a: mx.array  # [B, T, Hv, Dk], raw forget gate
    b: mx.array  # [B, T, Hv], raw write strength
    z: mx.array  # [B, T, Hv, Dv], raw output gate


class Memory(NamedTuple):
    """What a layer carries from step to step; None where a text begins."""

    q: mx.array | None = None  # windows [B, conv_kernel - 1, H * Dk]
    k: mx.array | None = None
    v: mx.array | None = None  # [B, conv_kernel - 1, Hv * Dv]
    state: mx.array | None = None  # [B, Hv, Dv, Dk], float32


def mix(
    p: Projections,
    memory: Memory,
    w: Parameters,
    padding: Padding | None = None,
    path: str = "auto",
) -> tuple[mx.array, Memory]:
    """Projections and memory -> (y [B, T, Hv, Dv], the next memory).

    ::

        q, k, v = silu(conv(x));  q, k unit length;  g = gate(a);  beta = sigmoid(b)
        o = kda(q, k, v, g, beta);  y = o / sqrt(mean o^2 + eps) * weight * sigmoid(z)

    Args:
        w: the layer's weights and sizes.
        padding: what of a batch is not real, if anything.
        path: of the recurrence, a path of `kda` by operations.
    """
    if p.q.shape[1] == 1 and padding is None and path == "auto" and memory.state is not None:
        return step(p, memory, w)
    return _mix(p, memory, w, padding, path)


def step(p: Projections, memory: Memory, w: Parameters) -> tuple[mx.array, Memory]:
    """One token after others: the same operations compiled, since calling them takes longer."""
    rest = (w.H, w.Hv, w.Dk, w.Dv, w.eps, w.beta_kind, w.gate.lower_bound)
    arrays = (*p, *memory, *w.conv_weight, w.weight, w.gate.A_log, w.gate.dt_bias)
    y, *memory = _compiled(*rest)(*arrays)
    return y, Memory(*memory)


@lru_cache(maxsize=64)
def _compiled(H, Hv, Dk, Dv, eps, beta_kind, lower_bound):
    """`_mix` of one token as a compiled function of arrays, for one kind of layer."""

    @mx.compile
    def call(*arrays: mx.array) -> tuple[mx.array, ...]:
        p, memory, conv_weight = Projections(*arrays[:6]), Memory(*arrays[6:10]), arrays[10:13]
        weight, A_log, dt_bias = arrays[13:]
        gate = Gate(A_log, dt_bias, lower_bound)
        y, memory = _mix(
            p, memory, Parameters(H, Hv, Dk, Dv, conv_weight, gate, weight, eps, beta_kind)
        )
        return y, *memory

    return call


def _mix(
    p: Projections,
    memory: Memory,
    w: Parameters,
    padding: Padding | None = None,
    path: str = "auto",
) -> tuple[mx.array, Memory]:
    past = zip(p[:3], w.conv_weight, memory[:3], strict=True)
    (q, k, v), windows = zip(*(short_conv(*each, padding) for each in past), strict=True)
    q, k = (x.reshape(*x.shape[:2], w.H, w.Dk) for x in (q, k))
    lengths = None if padding is None else padding.lengths
    o, state = attend(q, k, v.reshape(p.z.shape), p.a, p.b, memory.state, w, lengths, path)
    y = gated(rms_norm(o, w.weight, w.eps), p.z.astype(o.dtype))
    return y, Memory(*windows, state)


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    state: mx.array | None,
    w: Parameters,
    lengths: mx.array | None = None,
    path: str = "auto",
) -> tuple[mx.array, mx.array]:
    """Convolved q, k [B, T, H, Dk], v [B, T, Hv, Dv], raw gate a, raw beta b -> (o, state)."""
    if w.gate.lower_bound is None:
        g = softplus_gate(a, w.gate.A_log, w.gate.dt_bias)
    else:
        g = bounded_gate(a, w.gate.A_log, w.gate.dt_bias, w.gate.lower_bound)
    beta = mx.sigmoid(b.astype(mx.float32))
    if w.beta_kind == "twice":
        beta = 2 * beta
    # By operations where the op by itself would take a kernel: this is what stands in for them.
    options = {"state": state, "lengths": lengths, "path": path, "runner": "ops"}
    return kda(l2norm(q), l2norm(k), v, g, beta, **options)
