"""Candidates of `bench.cuda` in MLX: our operations, our kernels, and mlx-lm's two paths."""

from collections.abc import Iterator
from functools import cache, partial

import mlx.core as mx
import numpy as np

from ..kernels import metal_kernel
from ..kernels.chunk import kda_chunk
from ..kernels.recurrent import kda_recurrent
from ..ops import kda, kda_chunk_ref
from ..oracle import Inputs
from .shipped import mlx_lm_gated_delta

# mlx-lm's loop builds a graph node for every operation of every token.
_LOOP_TOKENS = 2048
RUNNER = "cuda"


def candidates(x: Inputs, heads: int) -> Iterator[tuple]:
    """(name, dtype, inputs given, call, wait, results -> numpy) of each; see `bench.cuda`."""
    for dtype in ("float32", "bfloat16"):
        kind = getattr(mx, dtype)
        small = [mx.array(a).astype(kind) for a in (x.q, x.k, x.v, x.beta)]
        given = [np.array(a.astype(mx.float32)) for a in small]
        rounded = Inputs(*given[:3], x.g, given[3])
        q, k, v, beta = (_over_heads(a, heads) for a in small)
        g = _over_heads(mx.array(x.g), heads)
        T, D = x.q.shape[1], x.q.shape[3]
        state = mx.zeros((1, heads, D, D))
        mx.eval(q, k, v, g, beta, state)
        for name, call in _calls(q, k, v, g, beta, state, T, D, dtype).items():
            yield name, dtype, rounded, _started(call), mx.eval, _read


def _calls(q, k, v, g, beta, state, T, D, dtype) -> dict:
    calls = {}
    if T == 1:
        step = mx.compile(lambda *a: kda(*a[:5], state=a[5], path="step"))
        calls["ours, operations"] = partial(step, q, k, v, g, beta, state)
    else:
        chunk = mx.compile(lambda *a: kda_chunk_ref(*a[:5], state=a[5], chunk=64))
        calls["ours, operations"] = partial(chunk, q, k, v, g, beta, state)
        calls["ours, kda_chunk exact"] = partial(
            kda_chunk, q, k, v, g, beta, state=state, runner=RUNNER
        )
        if dtype != "float32":
            calls["ours, kda_chunk half"] = partial(
                kda_chunk, q, k, v, g, beta, state=state, mode="half", runner=RUNNER
            )
    calls["ours, kda_recurrent"] = partial(
        kda_recurrent, q, k, v, g, beta, state=state, runner=RUNNER
    )
    scaled, decay = q * D**-0.5, mx.exp(g)
    mx.eval(scaled, decay)
    calls["mlx-lm, vector kernel"] = partial(_vector, scaled, k, v, decay, beta, state)
    if T <= _LOOP_TOKENS:
        from mlx_lm.models.gated_delta import gated_delta_ops

        calls["mlx-lm, loop"] = partial(gated_delta_ops, scaled, k, v, decay, beta, state)
    return calls


@cache
def _vector_kernel():
    return mlx_lm_gated_delta(partial(metal_kernel, runner=RUNNER))["gated_delta_step_vec"]


def _vector(q, k, v, decay, beta, state) -> list[mx.array]:
    """mlx-lm's Metal kernel for per-channel gates, its body through the same runner as ours."""
    B, T, H, D = q.shape
    return _vector_kernel()(
        inputs=[q, k, v, decay, beta, state, T],
        template=[
            ("InT", q.dtype), ("StT", mx.float32), ("Dk", D), ("Dv", D), ("Hk", H), ("Hv", H)
        ],
        grid=(32, D, B * H),
        threadgroup=(32, 4, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[q.dtype, mx.float32],
    )  # fmt: skip


def _started(call):
    """The call with its work handed to the GPU: MLX alone would wait until somebody looks."""

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
