"""One entrance to every path, which says what it chose and why."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from . import format
from .kernels import chunk, recurrent
from .ops import chunked, reference, stepwise
from .ops.inputs import Problem
from .runners import choose

# Measured on the CPU build: below this many tokens a chunk costs more than its tokens one by one.
_CHUNK_FROM = 16

_OPS: dict[str, Callable] = {
    "reference": reference.run,
    "step": stepwise.run,
    "chunk": chunked.run,
}
_KERNELS = ("kda_recurrent", "kda_chunk")
PATHS = ("auto", *_OPS, *_KERNELS)


def resolve(runner: str = "auto") -> tuple[str, str]:
    """(what runs a model's KDA layers, why): "ops" or the runner of their kernels.

    "auto" is "metal" on an Apple GPU and "ops" everywhere else: MLX's operations run on any
    device, while the other runners exist to prove the kernels.

    Raises:
        UserError: an unknown runner.
    """
    if runner == "ops":
        return "ops", "asked for"
    if runner != "auto":
        return choose(runner), "asked for"
    if mx.default_device().type != mx.DeviceType.gpu:
        return "ops", "MLX computes on the CPU here; the kernels are for Apple GPUs"
    if not mx.metal.is_available():
        return "ops", "the GPU is not Apple's; the kernels are for Apple GPUs"
    return "metal", "MLX computes on an Apple GPU"


@dataclass(frozen=True)
class Choice:
    """What the dispatcher runs for a call, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def kda(
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
    path: str = "auto",
    runner: str = "auto",
) -> tuple[mx.array, mx.array]:
    """Kimi Delta Attention and its lineage, by the fastest path that fits.

    Computes what `kda_ref` documents; `explain` tells which path a call takes.

    Args:
        q, k: [B, T, H, Dk] float32, float16 or bfloat16.
        v: [B, T, Hv, Dv], Hv a multiple of H.
        g: natural-log decay, float32: [B, T, Hv, Dk] (KDA), [B, T, Hv] (Gated DeltaNet), or None
            (DeltaNet).
        beta: [B, T, Hv], write strength, in (0, 1) or (0, 2).
        scale: factor on q, Dk**-0.5 unless given.
        state: [B, Hv, Dv, Dk] float32; zeros unless given.
        lengths: [B] integers; tokens at and past a row's length change nothing and output 0.
        delta_rule: False leaves the delta rule out: (gated) linear attention.
        path: "auto"; "reference", "step" or "chunk" (MLX operations, on any device); or the
            Metal kernels "kda_recurrent" or "kda_chunk".
        runner: what runs a kernel: "metal", "emulator", "emulator-fast", "cuda", or "auto" (the
            GPU at hand). "ops" with path "auto": no kernel, on any device.

    Returns:
        (o, state): [B, T, Hv, Dv] in v's dtype, [B, Hv, Dv, Dk] float32. All paths are
        differentiable; the gradient of a kernel is that of the chunkwise operations.

    Raises:
        ValueError: a shape, dtype or path that does not fit, named.
        UserError: a kernel on a machine that cannot run it.
    """
    p = Problem.read(q, k, v, g, beta, scale, state, lengths, delta_rule)
    choice = _choose(p, path, runner)
    if choice.path in _OPS:
        return _OPS[choice.path](p, q, k, v, g, beta, state, lengths)
    return _by_kernel(choice.path, runner, p, q, k, v, g, beta, state, lengths)


def explain(
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
    path: str = "auto",
    runner: str = "auto",
) -> Choice:
    """The path that `kda` takes for these arguments, and the reason; nothing is computed.

    Raises:
        ValueError: a shape, dtype or path that does not fit, named; a kernel asked for that has
            no instantiation for these arguments, with the reason.
    """
    return _choose(Problem.read(q, k, v, g, beta, scale, state, lengths, delta_rule), path, runner)


def _choose(p: Problem, path: str, runner: str) -> Choice:
    return _choose_on(p, path, runner, mx.default_device().type)


# A decode step asks the same question every time, and finding the words takes longer than a hash.
@lru_cache(maxsize=1024)
def _choose_on(p: Problem, path: str, runner: str, device: mx.DeviceType) -> Choice:
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, got {path!r}")
    if path in _KERNELS:
        fits, reason = _fits(path, p)
        if not fits:
            raise ValueError(f"path {path!r} cannot run: {reason}")
    if path != "auto":
        return Choice(path, "asked for by the caller")
    name, why_no_kernel = _kernel(p, runner)
    if name is not None:
        return Choice(name, why_no_kernel)
    if p.T >= _CHUNK_FROM:
        why = f"{format.tokens(p.T)} fill chunks: matrix products instead of a loop"
        return Choice("chunk", f"{why} ({why_no_kernel})")
    why = f"{format.tokens(p.T)}, fewer than {_CHUNK_FROM}: the state is read once a token"
    return Choice("step", f"{why} ({why_no_kernel})")


def _kernel(p: Problem, runner: str) -> tuple[str | None, str]:
    """The kernel for "auto" and the reason, or (None, why none)."""
    name, why = resolve(runner)
    if name == "ops":
        return None, why
    if p.empty:
        return None, "there is nothing to compute"
    path = "kda_chunk" if p.T > _CHUNK_FROM else "kda_recurrent"
    fits, reason = _fits(path, p)
    return (path, f"{format.tokens(p.T)}; {why}") if fits else (None, reason)


def _fits(path: str, p: Problem) -> tuple[bool, str]:
    module = chunk if path == "kda_chunk" else recurrent
    return module.supported(p.Dk, p.Dv, p.dtype)


def _by_kernel(
    path: str,
    runner: str,
    p: Problem,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array | None,
    beta: mx.array,
    state: mx.array | None,
    lengths: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Run a kernel so that its gradient is that of the chunkwise operations."""
    run = chunk.kda_chunk if path == "kda_chunk" else recurrent.kda_recurrent
    options = {"scale": p.scale, "lengths": lengths, "delta_rule": p.delta_rule, "runner": runner}
    given = [x for x in (g, state) if x is not None]

    def spread(arrays):
        q, k, v, beta, *rest = arrays
        g_in = rest.pop(0) if g is not None else None
        return (q, k, v, g_in, beta), (rest[0] if rest else None)

    @mx.custom_function
    def forward(*arrays):
        inputs, S = spread(arrays)
        return run(*inputs, state=S, **options)

    @forward.vjp
    def backward(primals, cotangents, _):
        def ops(*arrays):
            inputs, S = spread(arrays)
            return chunked.run(p, *inputs, S, lengths)

        return mx.vjp(ops, list(primals), list(cotangents))[1]

    return tuple(forward(q, k, v, beta, *given))
