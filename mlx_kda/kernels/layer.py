"""A KDA layer between its projections, by kernels: one launch to decode, a few to prefill."""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from . import chunk, decode, epilogue, prologue, recurrent
from .arguments import Gate
from .decode import Memory

# Up to this many tokens a chunk of 16 would be mostly padding.
SHORT = 16


class Parameters(NamedTuple):
    """What a layer's kernels need of its weights and sizes."""

    H: int
    Hv: int
    Dk: int
    Dv: int
    conv_weight: tuple[
        mx.array, mx.array, mx.array
    ]  # of q, k, v: [channels, conv_kernel] or [channels, conv_kernel, 1]
    gate: Gate
    weight: mx.array  # of the output norm, [Dv]
    eps: float
    beta_kind: str = "sigmoid"


class Choice(NamedTuple):
    """Which kernel takes a call, or that none does, and why."""

    kernel: str | None  # "kda_decode", "kda_recurrent", "kda_chunk"
    reason: str


def choose(
    T: int, Dk: int, Dv: int, dtype: mx.Dtype, conv_kernel: int = 4, mode: str = "exact"
) -> Choice:
    """The kernel for T tokens of a layer and the reason, or (None, why none)."""
    if T == 0:
        return Choice(None, "there are no tokens")
    if T <= decode.MAX_TOKENS:
        ok, reason = decode.supported(Dk, Dv, dtype, T, conv_kernel)
        name, why = "kda_decode", f"T = {T} is at most {decode.MAX_TOKENS}: one launch for it all"
    elif T <= SHORT:
        ok, reason = recurrent.supported(Dk, Dv, dtype)
        name, why = "kda_recurrent", f"T = {T} would hardly fill a chunk of {chunk.CHUNK}"
    else:
        ok, reason = chunk.supported(Dk, Dv, dtype, mode)
        name, why = "kda_chunk", f"T = {T}: chunks of {chunk.CHUNK} tokens, {mode} operands"
    if ok and name != "kda_decode":
        ok, reason = prologue.supported(Dk, Dv, dtype, conv_kernel)
    return Choice(name, why) if ok else Choice(None, reason)


def empty_memory(p: Parameters, B: int, dtype: mx.Dtype) -> Memory:
    """The memory at the start of a text: zeros."""
    before = p.conv_weight[0].shape[1] - 1
    channels = (p.H * p.Dk, p.H * p.Dk, p.Hv * p.Dv)
    windows = (mx.zeros((B, before, n), dtype=dtype) for n in channels)
    return Memory(*windows, mx.zeros((B, p.Hv, p.Dv, p.Dk), dtype=mx.float32))


def mix(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    z: mx.array,
    p: Parameters,
    memory: Memory,
    *,
    lengths: mx.array | None = None,
    mode: str = "exact",
    runner: str = "auto",
) -> tuple[mx.array, Memory]:
    """Projections and memory -> (y, the next memory), by the kernel that `choose` names.

    ::

        q, k, v = silu(conv(x));  q, k unit length;  g = gate(a);  beta = sigmoid(b)
        o = kda(q, k, v, g, beta);  y = o / sqrt(mean o^2 + eps) * weight * sigmoid(z)

    Args:
        q, k, v: projections [B, T, channels]; a [B, T, Hv, Dk]; b [B, T, Hv]; z [B, T, Hv, Dv].
        p: the layer's weights and sizes.
        memory: of the step before, or `empty_memory`.
        lengths: [B] integers; tokens past a row's length change nothing and output 0.
        mode: operands of the chunked kernel, "exact" or "half".
        runner: "metal", "emulator", "emulator-fast", "cuda" or "auto".

    Returns:
        (y, memory): y [B, T, Hv, Dv] in v's dtype.

    Raises:
        ValueError: no kernel takes the call, or a shape or dtype that does not fit.
    """
    choice = choose(q.shape[1], p.Dk, p.Dv, v.dtype, p.conv_weight[0].shape[1], mode)
    if choice.kernel is None:
        raise ValueError(f"no kernel for this layer: {choice.reason}")
    if choice.kernel == "kda_decode":
        return decode.kda_decode(
            *(q, k, v, a, b, z),
            conv_weight=p.conv_weight,
            weight=p.weight,
            eps=p.eps,
            memory=memory,
            gate=p.gate,
            beta_kind=p.beta_kind,
            lengths=lengths,
            runner=runner,
        )
    (q, k, v), windows = prologue.kda_prologue(
        q,
        k,
        v,
        conv_weight=p.conv_weight,
        windows=memory[:3],
        H=p.H,
        Hv=p.Hv,
        lengths=lengths,
        runner=runner,
    )
    options = {"state": memory.state, "lengths": lengths, "gate": p.gate, "beta_kind": p.beta_kind}
    if choice.kernel == "kda_chunk":
        o, state = chunk.kda_chunk(q, k, v, a, b, **options, mode=mode, runner=runner)
    else:
        o, state = recurrent.kda_recurrent(q, k, v, a, b, **options, runner=runner)
    y = epilogue.kda_epilogue(o, z, p.weight, p.eps, lengths=lengths, runner=runner)
    return y, Memory(*windows, state)


def warm_up(
    layers: list[Parameters],
    dtype: mx.Dtype,
    *,
    mode: str = "exact",
    runner: str = "auto",
    progress: Callable[[int, int, str], None] | None = None,
) -> list[str]:
    """Compile every kernel that these layers will call, by one small call each.

    Layers that share an instantiation count once. A kernel that does not compile raises what the
    runner raises.

    Args:
        layers: parameters of the model's KDA layers.
        dtype: of the activations.
        mode, runner: as in `mix`.
        progress: called as progress(done, total, what is being compiled).

    Returns:
        What was compiled, by name.
    """
    kinds = {}
    for p in layers:
        arrays = (*p.conv_weight, p.weight, p.gate.A_log, p.gate.dt_bias)
        key = (p.Dk, p.Dv, p.conv_weight[0].shape[1], p.gate.lower_bound is None, p.beta_kind)
        kinds.setdefault(key + tuple(x.dtype for x in arrays), p)
    jobs = [(p, T) for p in kinds.values() for T in (1, SHORT, SHORT + 1)]
    done = []
    for i, (p, T) in enumerate(jobs):
        choice = choose(T, p.Dk, p.Dv, dtype, p.conv_weight[0].shape[1], mode)
        if choice.kernel is None:
            continue
        what = f"{choice.kernel} Dk={p.Dk} Dv={p.Dv}"
        if progress is not None:
            progress(i, len(jobs), what)
        shapes = [(1, T, n) for n in (p.H * p.Dk, p.H * p.Dk, p.Hv * p.Dv)]
        shapes += [(1, T, p.Hv, p.Dk), (1, T, p.Hv), (1, T, p.Hv, p.Dv)]
        inputs = [mx.zeros(shape, dtype=dtype) for shape in shapes]
        mx.eval(mix(*inputs, p, empty_memory(p, 1, dtype), mode=mode, runner=runner))
        done.append(what)
    if progress is not None:
        progress(len(jobs), len(jobs), "")
    return done
