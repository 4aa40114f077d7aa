"""Faults that others shipped (cases A1 to A9), with the right value."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from tolerances import OP_FLOAT32, OP_LONG

from mlx_kda.attention import explain, kda
from mlx_kda.ops import bounded_gate, kda_chunk_ref, kda_ref, l2norm, softplus_gate
from mlx_kda.ops import reference64 as oracle

kda_step = partial(kda, path="step")
PATHS = ("reference", "step", "chunk")


def numpy_gates(a, A_log, dt_bias, lower_bound=None):
    """Both gates in float64, dt_bias per channel."""
    a = a.astype(np.float64) + dt_bias.reshape(a.shape[-2:]).astype(np.float64)
    rate = np.exp(A_log.astype(np.float64)).reshape(-1, 1)
    if lower_bound is None:
        return -rate * np.logaddexp(a, 0)
    return lower_bound / (1 + np.exp(-rate * a))


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("shape", ["[H, Dk]", "flat"])
def test_a1_dt_bias_is_per_channel(gate, shape):
    """Case A1: a bias per head is 0.6 to 0.9 wrong; [H, Dk] and flat [H * Dk] are the same."""
    rng = np.random.default_rng(0)
    H, Dk = 3, 16
    a = rng.standard_normal((2, 5, H, Dk)).astype(np.float32)
    A_log = rng.uniform(0, 2, H).astype(np.float32)
    dt_bias = rng.uniform(-6, 2, (H, Dk)).astype(np.float32)
    bias = mx.array(dt_bias if shape == "[H, Dk]" else dt_bias.reshape(-1))
    if gate == "softplus":
        got, truth = (
            softplus_gate(mx.array(a), mx.array(A_log), bias),
            numpy_gates(a, A_log, dt_bias),
        )
    else:
        got = bounded_gate(mx.array(a), mx.array(A_log), bias, -5.0)
        truth = numpy_gates(a, A_log, dt_bias, -5.0)
    assert got.dtype == mx.float32
    assert oracle.error(np.array(got), truth) < OP_FLOAT32


@pytest.mark.parametrize("size", ["[H]", "[Dk]", "[H, 1]", "[Dk, H]", "scalar"])
def test_a1_a_bias_per_head_is_refused(size):
    """Case A1: a dt_bias of another size raises and names its shape."""
    H, Dk = 3, 16
    shape = {"[H]": (H,), "[Dk]": (Dk,), "[H, 1]": (H, 1), "[Dk, H]": (Dk, H), "scalar": ()}[size]
    a, A_log = mx.zeros((1, 2, H, Dk)), mx.zeros((H,))
    for gate in (softplus_gate, lambda *x: bounded_gate(*x, -5.0)):
        with pytest.raises(ValueError, match="dt_bias .*got shape"):
            gate(a, A_log, mx.zeros(shape))


@pytest.mark.parametrize("amplitude", [1, 0.1, 1e-2, 1e-3, 1e-4, 0])
def test_a2_l2norm_adds_eps_to_the_sum(amplitude):
    """Case A2: eps on the mean is 0.87 off at amplitude 1e-4; a row of zeros stays zero."""
    x = amplitude * np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    x64 = x.astype(np.float64)
    truth = x64 / np.sqrt((x64**2).sum(-1, keepdims=True) + 1e-6)
    got = np.array(l2norm(mx.array(x)))
    assert np.isfinite(got).all()
    assert np.abs(got - truth).max() <= 1e-5 * max(np.abs(truth).max(), 1e-30)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_a3_scale_is_applied_once(path, scale):
    """Case A3: Dk = 64, Dv = 128; slope 1 against the reference; explicit scales count."""
    x = oracle.make("random", T=40, H=1, Dk=64, Dv=128)
    o, _ = kda(*[mx.array(a) for a in x.arrays()], scale=scale, path=path)
    truth, _ = oracle.recurrence(*x.arrays(), scale=64**-0.5 if scale is None else scale)
    slope = (np.array(o) * truth).sum() / (truth**2).sum()
    assert abs(slope - 1) < 1e-4


def test_a4_two_gate_laws():
    """Case A4: with every parameter zero, -0.6931 (softplus) and -2.5 (bound -5)."""
    zero = mx.zeros((1, 1, 1, 4))
    A_log, bias = mx.zeros((1,)), mx.zeros((4,))
    assert np.allclose(np.array(softplus_gate(zero, A_log, bias)), -np.log(2), atol=1e-6)
    assert np.allclose(np.array(bounded_gate(zero, A_log, bias, -5.0)), -2.5, atol=1e-6)
    with pytest.raises(ValueError, match="lower_bound must be negative"):
        bounded_gate(zero, A_log, bias, 5.0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a5_slow_decay_is_not_rounded(path, dtype):
    """Case A5: 4,096 tokens at g = -8e-5 leave 0.7206 of the state; rounded decay leaves 1."""
    T, shape = 4096, (1, 4096, 1, 4)
    zero = mx.zeros(shape, dtype=dtype)
    state = mx.ones((1, 1, 4, 4))
    _, S = kda(
        zero,
        zero,
        zero,
        mx.full(shape, -8e-5),
        mx.zeros((1, T, 1), dtype=dtype),
        state=state,
        path=path,
    )
    assert abs(mx.linalg.norm(S).item() / 4 - 0.7206) < 1e-3


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("steps", [512, 4096])
def test_a6_the_state_stays_float32_in_single_steps(dtype, steps):
    """Case A6: half-precision inputs, one token at a time, g = -1e-3; a half state is 8 % wrong."""
    x = oracle.make("random", T=steps, H=1, Dk=16, Dv=8)
    q, k, v, beta = (mx.array(a).astype(dtype) for a in (x.q, x.k, x.v, x.beta))
    g = mx.full(x.g.shape, -1e-3)
    S = None
    for t in range(steps):
        now = slice(t, t + 1)
        _, S = kda(q[:, now], k[:, now], v[:, now], g[:, now], beta[:, now], state=S)
        assert S.dtype == mx.float32
        mx.eval(S)
    rounded = [np.array(a.astype(mx.float32)) for a in (q, k, v)]
    _, truth = oracle.recurrence(*rounded, np.array(g), np.array(beta.astype(mx.float32)))
    assert oracle.error(np.array(S), truth) < OP_LONG


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("Dk,Dv", [(24, 24), (16, 40)])
def test_a7_the_state_is_values_by_keys(path, Dk, Dv):
    """Case A7: S[i, j] = i + 0.01 j, no decay, nothing written: o = S q; a square S hides it."""
    S = np.arange(Dv)[:, None] + 0.01 * np.arange(Dk)[None]
    q = np.random.default_rng(0).standard_normal((1, 1, 1, Dk)).astype(np.float32)
    k, v = mx.ones((1, 1, 1, Dk)), mx.ones((1, 1, 1, Dv))
    o, S_out = kda(
        mx.array(q),
        k,
        v,
        mx.zeros((1, 1, 1, Dk)),
        mx.zeros((1, 1, 1)),
        scale=1.0,
        state=mx.array(S.astype(np.float32))[None, None],
        path=path,
    )
    assert oracle.error(np.array(o)[0, 0, 0], S @ q[0, 0, 0]) < OP_FLOAT32
    assert np.array_equal(np.array(S_out)[0, 0], S.astype(np.float32))


@pytest.mark.parametrize("first", PATHS)
@pytest.mark.parametrize("second", PATHS)
def test_a7_any_path_goes_on_from_any_other(first, second):
    """Case A7: prefill 200 on one path, decode 100 on another, Dk != Dv."""
    x = oracle.make("collinear", T=300, H=1, Dk=32, Dv=16)
    o, S = oracle.recurrence(*x.arrays())
    arrays = [mx.array(a) for a in x.arrays()]
    _, state = kda(*[a[:, :200] for a in arrays], path=first)
    got, state = kda(*[a[:, 200:] for a in arrays], state=state, path=second)
    assert oracle.error(np.array(got), o[:, 200:]) < OP_FLOAT32
    assert oracle.error(np.array(state), S) < OP_FLOAT32


WRONG = {
    "q": {"q": (2, 5, 3)},
    "k": {"k": (2, 5, 2, 9)},
    "v": {"v": (2, 6, 4, 6)},
    "Hv": {"v": (2, 5, 3, 6), "beta": (2, 5, 3), "g": (2, 5, 3, 8)},
    "beta": {"beta": (2, 5, 4, 1)},
    "beta ": {"beta": (2, 5)},
    "g": {"g": (2, 5, 2)},
    "g ": {"g": (2, 5, 4, 1)},
    "state": {"state": (2, 4, 8, 6)},
    "lengths": {"lengths": (3,)},
}


@pytest.mark.parametrize("fn", [kda, kda_ref, kda_chunk_ref, explain])
@pytest.mark.parametrize("name", WRONG)
def test_a9_a_wrong_shape_is_named(fn, name):
    """Case A9: what was read out of bounds elsewhere is a ValueError that names the argument."""
    shapes = {
        "q": (2, 5, 2, 8),
        "k": (2, 5, 2, 8),
        "v": (2, 5, 4, 6),
        "g": (2, 5, 4, 8),
        "beta": (2, 5, 4),
        "state": (2, 4, 6, 8),
        "lengths": (2,),
    } | WRONG[name]
    args = {
        n: mx.zeros(s, dtype=mx.int32 if n == "lengths" else mx.float32) for n, s in shapes.items()
    }
    with pytest.raises(ValueError, match=rf"^{name.strip()} .*\d"):
        fn(**args)


@pytest.mark.parametrize("name", ["q", "g", "state", "lengths"])
def test_a9_a_wrong_dtype_is_named(name):
    """Case A9: integers as activations, a half-precision gate or state, float lengths."""
    args = {
        "q": mx.zeros((1, 2, 1, 4)),
        "k": mx.zeros((1, 2, 1, 4)),
        "v": mx.zeros((1, 2, 1, 4)),
        "g": mx.zeros((1, 2, 1, 4)),
        "beta": mx.zeros((1, 2, 1)),
        "state": mx.zeros((1, 1, 4, 4)),
        "lengths": mx.array([2]),
    }
    wrong = {"q": mx.int32, "g": mx.bfloat16, "state": mx.float16, "lengths": mx.float32}[name]
    args[name] = args[name].astype(wrong)
    with pytest.raises(ValueError, match=f"^{name} must be"):
        kda(**args)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state", "lengths"])
@pytest.mark.parametrize("fn", [kda, kda_ref, kda_chunk_ref, explain])
def test_a9_what_is_no_array_is_named(fn, name):
    """Case A9: a list, a numpy array or a missing beta."""
    args = {
        "q": mx.zeros((1, 2, 1, 4)),
        "k": mx.zeros((1, 2, 1, 4)),
        "v": mx.zeros((1, 2, 1, 4)),
        "g": mx.zeros((1, 2, 1, 4)),
        "beta": mx.zeros((1, 2, 1)),
        "state": mx.zeros((1, 1, 4, 4)),
        "lengths": mx.array([2]),
    }
    args[name] = np.array(args[name])
    with pytest.raises(ValueError, match=f"^{name} must be an mx.array, got ndarray"):
        fn(**args)


@pytest.mark.parametrize("A_log", [(16,), (2,), (3, 3), ()])
def test_a9_a_log_of_another_size_is_refused(A_log):
    """Case A9: A_log holds one value per head, whatever its shape."""
    with pytest.raises(ValueError, match="A_log must hold one value per head"):
        softplus_gate(mx.zeros((1, 1, 3, 16)), mx.zeros(A_log), mx.zeros((48,)))


@pytest.mark.parametrize("path", PATHS)
def test_a9_inputs_are_never_written_to(path):
    """Case A9: every argument holds the same numbers after the call."""
    x = oracle.make("mixed", T=20, B=2, H=1, Hv=2, Dk=8, Dv=4).with_state()
    arrays = [mx.array(a) for a in (*x.arrays(), x.state)]
    lengths = mx.array([20, 7])
    mx.eval(kda(*arrays[:5], state=arrays[5], lengths=lengths, path=path))
    for now, before in zip(arrays, (*x.arrays(), x.state), strict=True):
        assert np.array_equal(np.array(now), before)
    assert lengths.tolist() == [20, 7]


def test_an_impossible_path_says_what_is_possible():
    x = oracle.make("random", T=2, Dk=4, Dv=4)
    with pytest.raises(ValueError, match="path must be one of auto, .*'fastest'"):
        kda(*[mx.array(a) for a in x.arrays()], path="fastest")


@pytest.mark.parametrize("T,H,path", [(1, 2, "step"), (1, 32, "step"), (5, 2, "step"),
                                      (16, 2, "chunk"), (700, 2, "chunk")])  # fmt: skip
def test_explain_tells_what_runs(T, H, path):
    x = oracle.make("random", T=T, H=H, Dk=128, Dv=128)
    arrays = [mx.array(a) for a in x.arrays()]
    choice = explain(*arrays)
    assert choice.path == path and choice.reason
    asked = explain(*arrays, path="reference")
    assert asked.path == "reference" and "asked" in asked.reason
