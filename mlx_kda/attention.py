"""`kda`, the entry point of every path, and how a path is chosen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from . import format
from .kernels import chunk, recurrent
from .kernels.arguments import supported
from .ops import chunked, reference, stepwise
from .ops.inputs import CheckedInputs
from .runners import choose

# Measured on the CPU build: below this many tokens a chunk costs more than its tokens one by one.
_CHUNK_FROM = 16

_OPS: dict[str, Callable[[CheckedInputs], tuple[mx.array, mx.array]]] = {
    "reference": reference.run,
    "step": stepwise.run,
    "chunk": chunked.run,
}
_KERNELS: dict[str, Callable[..., tuple[mx.array, mx.array]]] = {
    "kda_recurrent": recurrent.kda_recurrent,
    "kda_chunk": chunk.kda_chunk,
}
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
    """The path that a call takes, and why."""

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
    """KDA, Gated DeltaNet or DeltaNet, by the fastest path that fits.

    Computes what `kda_ref` documents; `explain` tells which path a call takes.

    Args:
        q, k: [B, T, H, Dk] float32, float16 or bfloat16.
        v: [B, T, Hv, Dv], Hv a multiple of H.
        g: natural-log decay, float32: [B, T, Hv, Dk] (KDA), [B, T, Hv] (Gated DeltaNet), or None
            (DeltaNet).
        beta: [B, T, Hv], write strength, in (0, 1) or (0, 2).
        scale: factor on q, ``Dk**-0.5`` unless given.
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
    x = CheckedInputs(
        q, k, v, g, beta, scale=scale, state=state, lengths=lengths, delta_rule=delta_rule
    )
    path = _choose(x, path, runner).path
    return _OPS[path](x) if path in _OPS else _by_kernel(path, runner, x)


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
    x = CheckedInputs(
        q, k, v, g, beta, scale=scale, state=state, lengths=lengths, delta_rule=delta_rule
    )
    return _choose(x, path, runner)


def _choose(x: CheckedInputs, path: str, runner: str) -> Choice:
    if path == "auto":
        runner, why = resolve(runner)
        return _choose_auto(x.T, x.Dk, x.Dv, x.dtype, x.empty, runner, why)
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, got {path!r}")
    if path in _KERNELS:
        fits, reason = supported(x.Dk, x.Dv, x.dtype)
        if not fits:
            raise ValueError(f"path {path!r} cannot run: {reason}")
    return Choice(path, "asked for by the caller")


# Every decode step makes the same choice, and writing its reason takes longer than a look-up.
@lru_cache(maxsize=1024)
def _choose_auto(
    T: int, Dk: int, Dv: int, dtype: mx.Dtype, empty: bool, runner: str, why: str
) -> Choice:
    """What "auto" means for a runner that was chosen because of ``why``."""
    if runner != "ops" and not empty:
        fits, reason = supported(Dk, Dv, dtype)
        if fits:
            path = "kda_chunk" if T > _CHUNK_FROM else "kda_recurrent"
            return Choice(path, f"{format.tokens(T)}; {why}")
        why = reason
    elif runner != "ops":
        why = "there is nothing to compute"
    ops = choose_operations(T)
    return Choice(ops.path, f"{ops.reason} ({why})")


def choose_operations(T: int) -> Choice:
    """The path by MLX operations for T tokens, and why."""
    if T >= _CHUNK_FROM:
        why = f"{format.tokens(T)} fill chunks: matrix products instead of a loop"
        return Choice("chunk", why)
    why = f"{format.tokens(T)}, fewer than {_CHUNK_FROM}: the state is read once per token"
    return Choice("step", why)


def _by_kernel(path: str, runner: str, x: CheckedInputs) -> tuple[mx.array, mx.array]:
    """Run a kernel so that its gradient is that of the chunkwise operations."""
    names = [n for n in ("q", "k", "v", "g", "beta", "state") if getattr(x, n) is not None]

    def given(arrays: Sequence[mx.array]) -> CheckedInputs:
        return x.replace(**dict(zip(names, arrays, strict=True)))

    @mx.custom_function
    def forward(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        return _KERNELS[path](given(arrays), runner=runner)

    @forward.vjp
    def backward(primals: Any, cotangents: Any, _: Any) -> Any:
        operations = lambda *arrays: chunked.run(given(arrays))  # noqa: E731
        return mx.vjp(operations, list(primals), list(cotangents))[1]

    made: Any = forward(*(getattr(x, n) for n in names))
    return made[0], made[1]
