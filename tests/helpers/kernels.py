"""Calls of the kernels with numpy in and out."""

import mlx.core as mx
import numpy as np

from helpers import layer64
from mlx_kda.kernels.arguments import LayerParameters, LayerState, Projections
from mlx_kda.kernels.chunk import kda_chunk
from mlx_kda.kernels.decode import kda_decode
from mlx_kda.kernels.recurrent import kda_recurrent
from mlx_kda.ops import reference64 as oracle
from mlx_kda.ops.gates import Gate
from mlx_kda.ops.inputs import CheckedInputs


def recurrent(*args, segment=None, runner="auto", **inputs):
    """`kda_recurrent` with the op's arguments."""
    return kda_recurrent(CheckedInputs(*args, **inputs), segment=segment, runner=runner)


def chunk(*args, mode="exact", segment=None, runner="auto", **inputs):
    """`kda_chunk` with the op's arguments."""
    return kda_chunk(CheckedInputs(*args, **inputs), mode=mode, segment=segment, runner=runner)


OPS = {"recurrent": recurrent, "chunk": chunk}


def numpy(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


def rounded(dtype: str):
    """numpy float32 in, numpy float32 that ``dtype`` can hold out."""
    return lambda x: numpy(mx.array(np.asarray(x, np.float32)).astype(getattr(mx, dtype)))


def as_dtype(x: oracle.Inputs, dtype: str) -> oracle.Inputs:
    """The inputs with activations and beta rounded to ``dtype``; gate and state stay float32."""
    r = rounded(dtype)
    return oracle.Inputs(r(x.q), r(x.k), r(x.v), x.g, r(x.beta), x.state)


def call(op, x: oracle.Inputs, dtype="float32", **options):
    """(o, state) of a recurrence for inputs that ``dtype`` can hold."""
    kind = getattr(mx, dtype)
    q, k, v, beta = (mx.array(a).astype(kind) for a in (x.q, x.k, x.v, x.beta))
    g = None if x.g is None else mx.array(x.g)
    if x.state is not None:
        options["state"] = mx.array(x.state)
    if options.get("lengths") is not None:
        options["lengths"] = mx.array(options["lengths"], dtype=mx.int32)
    o, S = op(q, k, v, g, beta, **options)
    assert o.dtype == kind and S.dtype == mx.float32
    return numpy(o), numpy(S)


def run(kernel: str, x: oracle.Inputs, dtype="float32", runner="emulator", **options):
    """``call`` of "recurrent" or "chunk"."""
    return call(OPS[kernel], x, dtype, runner=runner, **options)


def gate_of(layer: layer64.Layer) -> Gate:
    return Gate(f32(layer.A_log), f32(layer.dt_bias), layer.lower_bound)


def f32(x) -> mx.array:
    return mx.array(np.asarray(x, np.float32))


def layer_state(layer: layer64.Layer, dtype="float32") -> LayerState:
    kind = getattr(mx, dtype)
    return LayerState(*(f32(w).astype(kind) for w in layer.windows), f32(layer.state))


def projections(layer: layer64.Layer, start=0, stop=None, dtype="float32") -> Projections:
    arrays = (layer.q, layer.k, layer.v, layer.a, layer.b, layer.z)
    return Projections(*(f32(a[:, start:stop]).astype(getattr(mx, dtype)) for a in arrays))


def parameters(layer: layer64.Layer, dtype="float32") -> LayerParameters:
    Hv, Dk = layer.a.shape[2:]
    return LayerParameters(
        layer.H,
        Hv,
        Dk,
        layer.z.shape[-1],
        tuple(f32(w).astype(getattr(mx, dtype))[..., None] for w in layer.conv_weight),
        gate_of(layer),
        f32(layer.weight),
        layer.eps,
        layer.beta_kind,
    )


def step(layer: layer64.Layer, past: LayerState, start=0, stop=None, dtype="float32", **options):
    """Tokens start..stop of a layer through `kda_decode` -> (y, state) as MLX arrays."""
    options.setdefault("runner", "emulator")
    p = projections(layer, start, stop, dtype)
    return kda_decode(p, parameters(layer, dtype), past, **options)
