"""What the kernels' wrappers share: a layer's arguments, and inputs in the kernels' form."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from ..ops.gates import Gate
from ..runners.kernel import choose

DIMS = tuple(range(32, 257, 32))
# Values of the template constants GATE and BETA.
GATES = {"none": 0, "head": 1, "channel": 2, "softplus": 3, "bounded": 4}
BETAS = {"given": 0, "sigmoid": 1, "twice": 2}


class Projections(NamedTuple):
    """Everything a KDA layer computes from x alone, before any of it meets the past."""

    q: mx.array  # [B, T, H * Dk], before the convolution
    k: mx.array  # [B, T, H * Dk]
    v: mx.array  # [B, T, Hv * Dv]
    a: mx.array | None  # [B, T, Hv, Dk], raw gate (or a log decay where there is no `Gate`)
    b: mx.array  # [B, T, Hv], raw write strength
    z: mx.array  # [B, T, Hv, Dv], raw output gate

    def cut(self, start: int, stop: int) -> "Projections":
        """Tokens start..stop."""
        a = None if self.a is None else self.a[:, start:stop]
        q, k, v, b, z = (x[:, start:stop] for x in (*self[:3], *self[4:]))
        return Projections(q, k, v, a, b, z)


class LayerState(NamedTuple):
    """What a KDA layer carries from step to step; zeros at the start of a sequence."""

    q: mx.array  # window [B, conv_kernel - 1, H * Dk]
    k: mx.array  # window [B, conv_kernel - 1, H * Dk]
    v: mx.array  # window [B, conv_kernel - 1, Hv * Dv]
    state: mx.array  # [B, Hv, Dv, Dk] float32

    @classmethod
    def of(cls, windows: Sequence[mx.array], state: mx.array) -> "LayerState":
        q, k, v = windows
        return cls(q, k, v, state)


class LayerParameters(NamedTuple):
    """A KDA layer's sizes, and its weights between the projections."""

    H: int
    Hv: int
    Dk: int
    Dv: int
    # Of q, k, v: [channels, conv_kernel] or [channels, conv_kernel, 1].
    conv_weight: tuple[mx.array, mx.array, mx.array]
    gate: Gate | None
    norm_weight: mx.array  # of the output norm, [Dv]
    eps: float
    beta_kind: str = "sigmoid"

    @property
    def conv_kernel(self) -> int:
        weight = self.conv_weight[0]
        return weight.shape[1] if weight.ndim > 1 else 0

    def empty_state(self, B: int, dtype: mx.Dtype) -> LayerState:
        """The state at the start of B sequences of activations in ``dtype``."""
        channels = (self.H * self.Dk, self.H * self.Dk, self.Hv * self.Dv)
        windows = [mx.zeros((B, self.conv_kernel - 1, n), dtype=dtype) for n in channels]
        state = mx.zeros((B, self.Hv, self.Dv, self.Dk), dtype=mx.float32)
        return LayerState.of(windows, state)


def supported(Dk: int, Dv: int, dtype: mx.Dtype) -> tuple[bool, str]:
    """Whether the kernels have an instantiation for these head dimensions, and why not."""
    for name, dim in (("Dk", Dk), ("Dv", Dv)):
        if dim not in DIMS:
            return False, f"{name} = {dim} is not a multiple of 32 from 32 to 256"
    if dtype not in (mx.float32, mx.float16, mx.bfloat16):
        return False, f"activations are {dtype}, not float32, float16 or bfloat16"
    return True, "head dimensions and dtype have a kernel"


def beta_constant(kind: str) -> int:
    """The template constant BETA."""
    if kind not in BETAS:
        raise ValueError(f"beta_kind must be one of {', '.join(BETAS)}, got {kind!r}")
    return BETAS[kind]


def decay_inputs(g: mx.array | None, beta: mx.array, gate: Gate | None) -> tuple[mx.array, ...]:
    """The kernels' inputs g, A_log, dt_bias, beta; those that are not read hold zeros."""
    A_log, dt_bias = (None, None) if gate is None else (gate.A_log, gate.dt_bias)
    return in_device_memory(g, A_log, dt_bias, beta)


def lower_bound(gate: Gate | None) -> float:
    """The gate's bound as the kernels take it: 0 where there is none."""
    return 0.0 if gate is None or gate.lower_bound is None else float(gate.lower_bound)


def launches(
    T: int, segment: int | None, runner: str, multiple: int = 1
) -> Iterator[tuple[int, int]]:
    """(first token, tokens) of each launch of a prefill kernel over T tokens.

    ``segment`` tokens each, or if it is None 512: few enough that a Mac's screen stays alive and
    the workspace in its cache; 8,192 on CUDA, where starting a launch costs more. None of it
    changes what is compiled.

    Raises:
        ValueError: a segment that is not a multiple of ``multiple``.
    """
    if segment is None:
        segment = 8192 if choose(runner) == "cuda" else 512
    if segment < multiple or segment % multiple:
        what = "positive" if multiple == 1 else f"a multiple of {multiple} tokens"
        raise ValueError(f"segment must be {what}, got {segment}")
    return ((start, min(segment, T - start)) for start in range(0, T, segment))


def in_device_memory(*arrays: mx.array | None) -> tuple[mx.array, ...]:
    """The arrays, those of fewer than 8 values flat and padded, zeros in the place of None.

    MLX puts smaller inputs into another address space, which is another kernel to compile: a
    batch or a prompt of another size must not do that.
    """
    made = []
    for x in arrays:
        if x is None:
            x = floats((0.0,) * 8)
        elif x.size < 8:
            x = mx.pad(x.reshape(-1), (0, 8 - x.size))
        made.append(x)
    return tuple(made)


def lengths_or_full(lengths: mx.array | None, B: int, T: int) -> mx.array:
    """Valid tokens of each row, int32, at least 8 values."""
    if lengths is None:
        return integers((T,) * max(B, 8))
    return in_device_memory(lengths.astype(mx.int32))[0]


@lru_cache(maxsize=1024)
def integers(values: tuple[int, ...]) -> mx.array:
    """A constant array; the same object for the same values, so a step allocates nothing."""
    return mx.array(values, dtype=mx.int32)


@lru_cache(maxsize=1024)
def floats(values: tuple[float, ...]) -> mx.array:
    return mx.array(values, dtype=mx.float32)
