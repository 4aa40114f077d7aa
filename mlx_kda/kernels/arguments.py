"""What the kernels' wrappers share: gates, the template constants, inputs in kernel form."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from ..ops.inputs import Problem
from ..runners.kernel import choose

DIMS = tuple(range(32, 257, 32))
_GATES = {"none": 0, "head": 1, "channel": 2, "softplus": 3, "bounded": 4}
BETA_KINDS = {"given": 0, "sigmoid": 1, "twice": 2}


@dataclass(frozen=True)
class Gate:
    """How a raw gate a [B, T, Hv, Dk] becomes a log decay, inside the kernel.

    ``g = -exp(A_log) softplus(a + dt_bias)``, or with a lower bound (negative)
    ``g = lower_bound sigmoid(exp(A_log) (a + dt_bias))``. A_log holds Hv values and dt_bias one a
    channel, [Hv, Dk] or flat.
    """

    A_log: mx.array
    dt_bias: mx.array
    lower_bound: float | None = None

    def check(self, Hv: int, Dk: int) -> None:
        """A ValueError names the parameter that does not fit."""
        if self.A_log.size != Hv:
            raise ValueError(
                f"A_log must hold one value a head (Hv={Hv}), got shape {self.A_log.shape}"
            )
        if self.dt_bias.size != Hv * Dk or self.dt_bias.shape[-1] not in (Dk, Hv * Dk):
            raise ValueError(
                f"dt_bias must hold one value a channel ([Hv={Hv}, Dk={Dk}] or flat), "
                f"got shape {self.dt_bias.shape}"
            )
        if self.lower_bound is not None and not self.lower_bound < 0:
            raise ValueError(f"lower_bound must be negative, got {self.lower_bound}")


@dataclass(frozen=True)
class Decay:
    """Gate and write strength as a kernel takes them."""

    gate: int
    beta: int
    arrays: tuple[mx.array, ...]  # g, A_log, dt_bias, beta
    bound: float

    @classmethod
    def read(
        cls,
        shape: tuple[int, int, int, int],
        g: mx.array | None,
        beta: mx.array,
        gate: Gate | None,
        beta_kind: str,
    ) -> "Decay":
        """Check g, beta and the gate against shape = (B, T, Hv, Dk)."""
        B, T, Hv, Dk = shape
        if beta_kind not in BETA_KINDS:
            raise ValueError(f"beta_kind must be one of {', '.join(BETA_KINDS)}, got {beta_kind!r}")
        if tuple(beta.shape) != (B, T, Hv):
            raise ValueError(f"beta must be [B, T, Hv] = {(B, T, Hv)}, got shape {beta.shape}")
        kind = "none"
        if gate is not None:
            gate.check(Hv, Dk)
            if g is None or tuple(g.shape) != (B, T, Hv, Dk):
                got = None if g is None else g.shape
                raise ValueError(f"a raw gate must be [B, T, Hv, Dk] = {shape}, got shape {got}")
            kind = "softplus" if gate.lower_bound is None else "bounded"
        elif g is not None:
            if g.dtype != mx.float32:
                raise ValueError(f"g must be float32 (log decays do not fit {g.dtype})")
            if tuple(g.shape) not in ((B, T, Hv, Dk), (B, T, Hv)):
                raise ValueError(
                    f"g must be [B, T, Hv, Dk] = {shape} or [B, T, Hv], got shape {g.shape}"
                )
            kind = "channel" if g.ndim == 4 else "head"
        arrays = (
            unused() if g is None else in_device_memory(g),
            unused() if gate is None else in_device_memory(gate.A_log),
            unused() if gate is None else in_device_memory(gate.dt_bias),
            in_device_memory(beta),
        )
        bound = 0.0 if gate is None or gate.lower_bound is None else float(gate.lower_bound)
        return cls(_GATES[kind], BETA_KINDS[beta_kind], arrays, bound)


def read(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array | None,
    beta: mx.array,
    scale: float | None,
    state: mx.array | None,
    lengths: mx.array | None,
    delta_rule: bool,
    gate: Gate | None,
    beta_kind: str,
) -> tuple[Problem, Decay]:
    """Check one call of the op; `g` is a raw gate if there is a ``gate``."""
    p = Problem.read(q, k, v, g if gate is None else None, beta, scale, state, lengths, delta_rule)
    decay = Decay.read((p.B, p.T, p.Hv, p.Dk), g, beta, gate, beta_kind)
    return p, decay


def supported(Dk: int, Dv: int, dtype: mx.Dtype) -> tuple[bool, str]:
    """Whether the kernels have an instantiation for these head dimensions, and why not."""
    for name, dim in (("Dk", Dk), ("Dv", Dv)):
        if dim not in DIMS:
            return False, f"{name} = {dim} is not a multiple of 32 from 32 to 256"
    if dtype not in (mx.float32, mx.float16, mx.bfloat16):
        return False, f"activations are {dtype}, not float32, float16 or bfloat16"
    return True, "head dimensions and dtype have a kernel"


def launches(
    T: int, segment: int | None, runner: str, multiple: int = 1
) -> Iterator[tuple[int, int]]:
    """(first token, tokens) of each launch of a prefill kernel over T tokens.

    ``segment`` tokens each, or if it is None 512: few enough that a Mac's screen stays alive and
    the workspace in its cache; 8,192 on CUDA, where starting a launch costs more. None of it
    changes what is compiled.

    Raises:
        ValueError: a segment that is no multiple of ``multiple``.
    """
    if segment is None:
        segment = 8192 if choose(runner) == "cuda" else 512
    if segment < multiple or segment % multiple:
        what = "positive" if multiple == 1 else f"a multiple of {multiple} tokens"
        raise ValueError(f"segment must be {what}, got {segment}")
    return ((start, min(segment, T - start)) for start in range(0, T, segment))


def in_device_memory(x: mx.array) -> mx.array:
    """``x``, flat and padded to 8 numbers if it has fewer.

    MLX puts smaller inputs into another address space, which is another kernel to compile: a
    batch or a prompt of another size must not do that.
    """
    return x if x.size >= 8 else mx.pad(x.reshape(-1), (0, 8 - x.size))


def lengths_or_full(lengths: mx.array | None, B: int, T: int) -> mx.array:
    """Valid tokens of each row, int32, at least 8 numbers."""
    if lengths is None:
        return integers((T,) * max(B, 8))
    return in_device_memory(lengths.astype(mx.int32))


@lru_cache(maxsize=1024)
def integers(values: Sequence[int]) -> mx.array:
    """A constant array; the same object for the same values, so a step allocates nothing."""
    return mx.array(values, dtype=mx.int32)


@lru_cache(maxsize=1024)
def floats(values: Sequence[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)


def unused() -> mx.array:
    """An input that this instantiation does not read."""
    return floats((0.0,) * 8)
