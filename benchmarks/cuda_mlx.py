"""Candidates of cuda_peers.py in MLX: our operations, our kernels, and mlx-lm's two paths."""

from collections.abc import Iterator
from functools import cache, partial

import mlx.core as mx
import numpy as np
from cuda_peers import Candidate
from mlx_lm.models.gated_delta import gated_delta_ops
from peer_kernels import mlx_lm_call, mlx_lm_gated_delta

from mlx_kda.attention import kda
from mlx_kda.errors import UserError
from mlx_kda.kernels.chunk import kda_chunk
from mlx_kda.kernels.recurrent import kda_recurrent
from mlx_kda.ops import kda_chunk_ref
from mlx_kda.ops.inputs import CheckedInputs
from mlx_kda.ops.reference64 import Inputs
from mlx_kda.runners import metal_kernel

RUNNER = "cuda"
# mlx-lm's loop builds a graph node for every operation of every token.
_LOOP_TOKENS = 2048
# Tokens of one compiled function of ours, as a model's prefill step has.
_STEP = 2048


def check() -> None:
    """UserError where MLX has no CUDA GPU."""
    if not mx.cuda.is_available():
        raise UserError("the mlx candidates need MLX's CUDA build and a CUDA GPU")
    mx.set_default_device(mx.gpu)


def release() -> None:
    """Give memory kept for later back, for the other framework."""
    mx.clear_cache()


def candidates(x: Inputs, heads: int) -> Iterator[Candidate]:
    """Ours and mlx-lm's, in float32 and bfloat16."""
    for dtype in ("float32", "bfloat16"):
        kind = getattr(mx, dtype)
        small = [mx.array(a).astype(kind) for a in (x.q, x.k, x.v, x.beta)]
        given = [np.array(a.astype(mx.float32)) for a in small]
        rounded = Inputs(*given[:3], x.g, given[3])
        q, k, v, beta = (_over_heads(a, heads) for a in small)
        g = _over_heads(mx.array(x.g), heads)
        state = mx.zeros((1, heads, v.shape[-1], q.shape[-1]))
        mx.eval(q, k, v, g, beta, state)
        for name, call in _calls(q, k, v, g, beta, state).items():
            yield Candidate(name, dtype, rounded, _started(call), mx.eval, _read)


def _calls(q, k, v, g, beta, state) -> dict:
    T, D = q.shape[1], q.shape[-1]
    given = CheckedInputs(q, k, v, g, beta, state=state)
    chunk = partial(kda_chunk, given, runner=RUNNER)
    calls = {"ours, operations": partial(_operations, (q, k, v, g, beta), state)}
    if T > 1:
        calls["ours, kda_chunk exact"] = chunk
        if q.dtype != mx.float32:
            calls["ours, kda_chunk half"] = partial(chunk, mode="half")
    calls["ours, kda_recurrent"] = partial(kda_recurrent, given, runner=RUNNER)
    scaled, decay = q * D**-0.5, mx.exp(g)
    mx.eval(scaled, decay)
    theirs = (scaled, k, v, decay, beta, state)
    calls["mlx-lm, vector kernel"] = partial(_vector, *theirs)
    if T <= _LOOP_TOKENS:
        calls["mlx-lm, loop"] = partial(gated_delta_ops, *theirs)
    return calls


@cache
def _compiled(step: bool):
    if step:
        return mx.compile(lambda *a: kda(*a[:5], state=a[5], path="step"))
    return mx.compile(lambda *a: kda_chunk_ref(*a[:5], state=a[5], chunk=64))


def _operations(inputs, state) -> tuple[mx.array, mx.array]:
    """Our operations under mx.compile, a prefill step at a time."""
    T = inputs[0].shape[1]
    outputs = []
    for start in range(0, T, _STEP):
        part = [x[:, start : start + _STEP] for x in inputs]
        o, state = _compiled(T == 1)(*part, state)
        outputs.append(o)
    return mx.concatenate(outputs, axis=1), state


@cache
def _vector_kernel():
    return mlx_lm_gated_delta(partial(metal_kernel, runner=RUNNER))["gated_delta_step_vec"]


def _vector(*inputs) -> list[mx.array]:
    """mlx-lm's Metal kernel for per-channel gates, its body through the same runner as ours."""
    return _vector_kernel()(**mlx_lm_call(*inputs))


def _started(call):
    """The call with its work handed to the GPU: MLX alone would wait until the result is read."""

    def run():
        result = call()
        mx.async_eval(result)
        return result

    return run


def _over_heads(a: mx.array, heads: int) -> mx.array:
    """[1, T, 2, ...] repeated to [1, T, heads, ...]."""
    return mx.tile(a, (1, 1, heads // 2, *([1] * (a.ndim - 3))))


def _read(result) -> tuple[np.ndarray, np.ndarray]:
    o, S = result
    return np.array(o[:, :, :2].astype(mx.float32)), np.array(S[:, :2])
