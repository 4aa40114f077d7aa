"""kda_decode, kda_prologue and kda_epilogue against a layer in float64, in the checked emulator."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from helpers import layer64
from helpers.kernels import f32, gate_of, layer_state, numpy, parameters, projections, rounded, step
from tolerances import OP_FLOAT32, ROUNDED_ONCE

from mlx_kda.kernels.arguments import LayerParameters
from mlx_kda.kernels.decode import after, kda_decode, simd_groups, supported, token_capacity
from mlx_kda.kernels.epilogue import kda_epilogue
from mlx_kda.kernels.prologue import kda_prologue
from mlx_kda.ops import reference64 as oracle

DTYPES = ("float32", "float16", "bfloat16")
DIMS = range(32, 257, 32)


def check(layer, dtype="float32", lengths=None, **options):
    """One step against float64: output, state, windows (bitwise)."""
    if lengths is not None:
        options["lengths"] = mx.array(lengths)
    y, mem = step(layer, layer_state(layer, dtype), dtype=dtype, **options)
    truth_y, truth_S, windows = layer.run(lengths)
    bound = OP_FLOAT32
    if dtype != "float32":
        bound = ROUNDED_ONCE * oracle.error(rounded(dtype)(truth_y), truth_y)
    assert y.dtype == getattr(mx, dtype) and mem.state.dtype == mx.float32
    assert oracle.error(numpy(y), truth_y) < bound
    S = numpy(mem.state)
    assert oracle.error(S[:, -1] if options.get("keep") else S, truth_S) < OP_FLOAT32
    for got, truth in zip(mem[:3], windows, strict=True):
        assert got.dtype == y.dtype and np.array_equal(numpy(got), truth)
    return mem


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", range(1, 9))
def test_one_to_eight_tokens(T, dtype):
    """Fewer tokens than the convolution window as well."""
    check(layer64.make(T=T, Dk=64, Dv=32, rounded=rounded(dtype), seed=T), dtype)


@pytest.mark.parametrize("beta_kind", ["sigmoid", "twice"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("heads", [(1, 1), (2, 6)])
def test_gates_and_head_groups(heads, lower_bound, beta_kind):
    """Value heads that share a key head."""
    H, Hv = heads
    check(layer64.make(T=2, H=H, Hv=Hv, Dk=32, Dv=64, lower_bound=lower_bound, beta_kind=beta_kind))


@pytest.mark.parametrize("Dk", DIMS)
def test_every_key_size_with_another_value_size(Dk):
    """Dk != Dv throughout; 5 tokens, where the largest sizes need two launches."""
    Dv = 288 - Dk
    layer = layer64.make(B=1, T=5, H=1, Dk=Dk, Dv=Dv, conv_kernel=3)
    check(layer)
    assert token_capacity(Dk, Dv) in (4, 8)


@pytest.mark.parametrize("T,Dk,Dv", [(8, 32, 32), (1, 128, 128), (7, 224, 256)])
def test_the_state_after_every_token(T, Dk, Dv):
    """keep=True: entry t is what t + 1 tokens alone leave; `after` is an exact rollback."""
    layer = layer64.make(B=2, T=T, H=1, Dk=Dk, Dv=Dv)
    before = layer_state(layer)
    _, kept = step(layer, before, keep=True)
    plain = step(layer, before)[1]
    assert np.array_equal(numpy(kept.state[:, -1]), numpy(plain.state))
    for t in range(T):
        alone = step(layer, before, stop=t + 1, runner="emulator-fast")[1]
        back = after(t, f32(layer.q), f32(layer.k), f32(layer.v), before, kept)
        for got, truth in zip(back, alone, strict=True):
            assert np.array_equal(numpy(got), numpy(truth))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("lengths", [[0, 5, 2], [5, 9, 1]])
@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_tokens_past_a_length(lengths, poison, keep):
    """They output 0 and enter neither state nor window, whatever they hold."""
    layer = layer64.make(B=3, T=5, H=1, Hv=2, Dk=32, Dv=32)
    truth = layer.run(lengths)
    for x in (layer.q, layer.k, layer.v, layer.a, layer.b, layer.z):
        for b, n in enumerate(lengths):
            x[b, n:] = poison
    y, mem = step(layer, layer_state(layer), lengths=mx.array(lengths), keep=keep)
    S = numpy(mem.state)
    assert oracle.error(numpy(y), truth[0]) < OP_FLOAT32
    assert oracle.error(S[:, -1] if keep else S, truth[1]) < OP_FLOAT32
    for got, expect in zip(mem[:3], truth[2], strict=True):
        assert np.array_equal(numpy(got), np.float32(expect))


@pytest.mark.parametrize("amplitude", [1, 0.1, 1e-2, 1e-3, 1e-4, 0])
def test_the_norms_add_eps_to_the_sum(amplitude):
    """eps on the mean is 0.87 off at amplitude 1e-4; a row of zeros is no NaN."""
    layer = layer64.make(B=1, T=2, H=1, Dk=128, Dv=32)
    layer = replace(
        layer,
        q=np.float32(amplitude * layer.q).astype(np.float64),
        k=np.float32(amplitude * layer.k).astype(np.float64),
        windows=(0 * layer.windows[0], 0 * layer.windows[1], layer.windows[2]),
    )
    check(layer)


def test_slow_decay_is_not_rounded():
    """bfloat16 activations, g = -8e-5 per token, 512 tokens: 4 % must go, not 0 or 17."""
    layer = layer64.make(B=1, T=1, H=1, Dk=32, Dv=32, rounded=rounded("bfloat16"))
    layer = replace(
        layer,
        a=0 * layer.a - 9.4375,
        b=0 * layer.b - 60,
        A_log=0 * layer.A_log,
        dt_bias=0 * layer.dt_bias,
    )
    mem, g = layer_state(layer, "bfloat16"), layer.gate()
    for _ in range(512):
        mem = step(layer, mem, dtype="bfloat16", runner="emulator-fast")[1]
    expect = layer.state * np.exp(512 * g[0, 0])[None, :, None, :]
    assert oracle.error(numpy(mem.state) - layer.state, expect - layer.state) < 2e-3


def test_prepared_gate_and_beta():
    """Without a gate g is a log decay (per channel, per head, none), beta the strength itself."""
    layer = layer64.make(B=2, T=3, H=1, Hv=2, Dk=32, Dv=32)
    q, k, v = layer.mixed()
    beta = layer.beta()
    for g in (layer.gate(), layer.gate()[..., 0], None):
        o, S = oracle.recurrence(q, k, v, g, beta, state=layer.state)
        p = projections(layer)._replace(a=None if g is None else f32(g), b=f32(beta))
        w = parameters(layer)._replace(gate=None, beta_kind="given")
        y, mem = kda_decode(p, w, layer_state(layer), runner="emulator")
        norm = np.sqrt((o**2).mean(-1, keepdims=True) + layer.eps)
        truth = o / norm * layer.weight * layer64.sigmoid(layer.z)
        assert oracle.error(numpy(y), truth) < OP_FLOAT32
        assert oracle.error(numpy(mem.state), S) < OP_FLOAT32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T,Dk,Dv,conv_kernel", [(1, 32, 64, 4), (33, 64, 32, 4), (16, 256, 96, 2)])
def test_the_prologue(T, Dk, Dv, conv_kernel, dtype):
    """q, k, v and windows of a ragged batch, poison past the lengths."""
    layer = layer64.make(
        B=2, T=T, H=1, Hv=2, Dk=Dk, Dv=Dv, conv_kernel=conv_kernel, rounded=rounded(dtype), seed=T
    )
    lengths = [T, T // 2]
    windows = layer.run(lengths)[2]
    truth = [x.copy() for x in layer.mixed()]
    for x in (layer.q, layer.k, layer.v):
        x[1, lengths[1] :] = np.nan
    kind = getattr(mx, dtype)
    got, next_windows = kda_prologue(
        *(projections(layer, dtype=dtype), parameters(layer, dtype), layer_state(layer, dtype)),
        lengths=mx.array(lengths),
        runner="emulator",
    )
    for x, t in zip(got, truth, strict=True):
        t[1, lengths[1] :] = 0
        bound = max(OP_FLOAT32, ROUNDED_ONCE * oracle.error(rounded(dtype)(t), t))
        assert x.dtype == kind and oracle.error(numpy(x), t) < bound
    for x, t in zip(next_windows, windows, strict=True):
        assert np.array_equal(numpy(x), np.float32(t))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B,T,Hv,Dv", [(1, 1, 1, 32), (2, 5, 3, 96), (1, 3, 2, 256)])
def test_the_epilogue(B, T, Hv, Dv, dtype):
    """One rounding; rows not divisible by 4; poison past a length gives 0."""
    rng = np.random.default_rng(T)
    r = rounded(dtype)
    o, z = (r(rng.standard_normal((B, T, Hv, Dv))).astype(np.float64) for _ in range(2))
    o *= 1e-3
    o = r(o).astype(np.float64)
    weight = rng.uniform(0.5, 2, Dv).astype(np.float32)
    w = LayerParameters(1, Hv, 32, Dv, (), None, mx.array(weight), 1e-5)
    lengths = [T] * (B - 1) + [T - 1]
    truth = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5) * weight * layer64.sigmoid(z)
    truth[-1, T - 1 :] = 0
    o[-1, T - 1 :] = np.nan
    z[-1, T - 1 :] = 1e30
    kind = getattr(mx, dtype)
    y = kda_epilogue(
        *(f32(o).astype(kind), f32(z).astype(kind), w),
        lengths=mx.array(lengths),
        runner="emulator",
    )
    bound = max(OP_FLOAT32, ROUNDED_ONCE * oracle.error(r(truth), truth))
    assert y.dtype == kind and oracle.error(numpy(y), truth) < bound


@pytest.mark.parametrize(
    "change,message",
    [
        ({"q": (2, 3, 63)}, "q must have shape"),
        ({"v": (2, 3, 32)}, "v must have shape"),
        ({"b": (2, 3, 2, 1)}, r"beta must be \[B, T, Hv\]"),
        ({"a": (2, 3, 2)}, "raw gate must be"),
        ({"z": (2, 3, 64)}, "z must have shape"),
        ({"dt_bias": (2,)}, "dt_bias must hold one value per channel"),
        ({"A_log": (32,)}, "A_log must hold one value per head"),
        ({"weight": (64,)}, "norm_weight must be"),
    ],
)
def test_a_wrong_shape_is_named(change, message):
    """Every array of a layer."""
    layer = layer64.make(B=2, T=3, H=2, Dk=32, Dv=32)
    wrong = replace(layer, **{n: np.zeros(shape) for n, shape in change.items()})
    w = parameters(layer)._replace(gate=gate_of(wrong), norm_weight=f32(wrong.weight))
    with pytest.raises(ValueError, match=message):
        kda_decode(projections(wrong), w, layer_state(layer), runner="emulator-fast")


def test_wrong_windows_and_states_are_named():
    layer = layer64.make(B=2, T=3, H=2, Dk=32, Dv=32)
    mem = layer_state(layer)
    for wrong, message in (
        (mem._replace(k=mem.k[:, 1:]), "the window of k must have shape"),
        (mem._replace(state=mem.state.astype(mx.float16)), "state must be float32"),
        (mem._replace(state=mem.state[0]), "state must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            step(layer, wrong, runner="emulator-fast")


@pytest.mark.parametrize("T", [0, 9])
def test_other_lengths_are_refused(T):
    """T = 0 and T = 9 are not decode steps, and the reason says what is."""
    assert supported(128, 128, mx.bfloat16, T=T) == (
        False,
        f"T = {T}: the decode kernel takes 1 to 8 tokens",
    )
    layer = layer64.make(B=1, T=T, H=1, Dk=32, Dv=32)
    with pytest.raises(ValueError, match="takes 1 to 8 tokens"):
        step(layer, layer_state(layer), runner="emulator-fast")


def test_threads_of_every_size():
    """128 to 256 threads, so that a lane may use all the registers there are."""
    for Dv in DIMS:
        groups = simd_groups(Dv)
        assert Dv % (8 * groups) == 0 and 4 <= groups <= 8
