"""`bench counters`: our kernels beside mlx-lm's and MLX's, counted in the same emulator.

The counts are exact; the core-cycles are a model of M1-class cores (`mlx_kda.runners.counters`),
and nothing here was measured on a GPU.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..runners.counters import MODEL, Counts, count, counting
from ..runners.kernel import metal_kernel

COUNTER = "emulator-count"


def run(tokens: int = 64, dim: int = 128, dtype: str = "bfloat16") -> Iterator[dict[str, Any]]:
    """One row for each kernel, per token and head, as they come.

    Prefill kernels run ``tokens`` tokens of one head, Dk = Dv = ``dim``; the decode step one token.
    The state's traffic is spread over the tokens.
    """
    inputs = _Inputs(tokens, dim, getattr(mx, dtype))
    for name, gate, launches in _candidates(inputs):
        T = 1 if "decode" in name else tokens
        total = sum((counts for _, counts in launches), Counts())
        if len(launches) > 1:
            for launch, counts in launches:
                yield _row(f"{name}: {launch}", gate, T, counts)
        yield _row(name, gate, T, total)


def _row(name, gate, T, counts: Counts) -> dict[str, Any]:
    per = counts.per(T)
    shown = (
        "mma fma add mul special convert shuffles simd_sums simd_barriers barriers device_bytes "
        "device_lane_bytes threadgroup_bytes"
    )
    return {
        "candidate": name,
        "gate": gate,
        "T": T,
        **{key: float(getattr(per, key)) for key in shown.split()},
        "unique_bytes": float(per.unique_read + per.unique_written),
        "threadgroup_memory": per.threadgroup_memory,
        "alu": per.alu_cycles,
        "l1": per.l1_cycles,
        "threadgroup": per.threadgroup_cycles,
        "overlapped": per.cycles_overlapped,
        "serial": per.cycles_serial,
        "cycles": MODEL,
    }


class _Inputs:
    """One head's arrays; their values do not change a count."""

    def __init__(self, T, D, dtype):
        rng = np.random.default_rng(0)
        k = rng.standard_normal((1, T, 1, D))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        self.T, self.D, self.dtype = T, D, dtype
        self.k = self.q = mx.array(k.astype(np.float32)).astype(dtype)
        self.v = mx.array(rng.standard_normal((1, T, 1, D)).astype(np.float32)).astype(dtype)
        self.g = mx.array(-rng.uniform(0.01, 1, (1, T, 1, D)).astype(np.float32))
        self.beta = mx.full((1, T, 1), 0.5).astype(dtype)
        self.state = mx.zeros((1, 1, D, D))

    def peer(self, scalar):
        decay = mx.exp(self.g[..., 0] if scalar else self.g)
        return self.q, self.k, self.v, decay, self.beta, self.state


def _candidates(x: _Inputs):
    """(name, gate, [(launch, counts)]) of every kernel that takes these sizes."""
    from .shipped import mlx_call, mlx_gated_delta, mlx_lm_call, mlx_lm_gated_delta

    yield from _ours(x)
    theirs = mlx_lm_gated_delta(metal_kernel)
    packed = [("gated_delta_step_packed_btree", "head", 8)] if x.D == 128 else []
    for name, gate, rows in (
        ("gated_delta_step_vec", "channel", 1),
        ("gated_delta_step", "head", 1),
        *packed,
    ):
        call = mlx_lm_call(*x.peer(gate == "head"), rows=rows)
        yield f"mlx-lm {name}", gate, [(name, count(theirs[name], **call))]
    for name in ("gated_delta_seq", "gated_delta_fused_chunk"):
        q, k, v, g, beta, state = x.peer(scalar=True)
        call = mlx_call(name, q, k, v, g.astype(x.dtype), beta, state)
        yield f"MLX {name}", "head", [(name, count(mlx_gated_delta(metal_kernel, name), **call))]


def _ours(x: _Inputs):
    from ..kernels.chunk import kda_chunk
    from ..kernels.recurrent import kda_recurrent
    from ..ops.inputs import CheckedInputs

    given = CheckedInputs(x.q, x.k, x.v, x.g, x.beta.astype(mx.float32), state=x.state)
    modes = ["exact"] + (["half"] if x.dtype != mx.float32 else [])
    for mode in modes:
        call = partial(kda_chunk, given, mode=mode, runner=COUNTER)
        yield f"ours chunk {mode}", "channel", _logged(call)
    call = partial(kda_recurrent, given, runner=COUNTER)
    yield "ours recurrent", "channel", _logged(call)
    yield "ours decode (whole layer)", "channel", _logged(partial(_decode, x))


def _decode(x: _Inputs):
    from ..kernels.arguments import LayerParameters, LayerState, Projections
    from ..kernels.decode import kda_decode

    window = mx.zeros((1, 3, x.D), x.dtype)
    conv_weight = mx.ones((x.D, 4), x.dtype)
    flat = x.q[:, :1, 0]
    p = Projections(flat, flat, flat, x.g[:, :1], x.beta[:, :1], x.v[:, :1])
    weight = mx.ones((x.D,), x.dtype)
    w = LayerParameters(1, 1, x.D, x.D, (conv_weight,) * 3, None, weight, 1e-5)
    return kda_decode(p, w, LayerState(window, window, window, x.state), runner=COUNTER)


def _logged(call):
    with counting() as log:
        mx.eval(call())
    return log
