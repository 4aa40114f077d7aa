"""Faults that others shipped (cases A, B, C and G), at kernel level, in the checked emulator."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import layer64
from helpers.kernels import OPS, as_dtype, f32, gate_of, numpy, rounded, run
from tolerances import OP_FLOAT32, OP_LONG, ROUNDED_ONCE, SPLIT

from mlx_kda.kernels.chunk import supported
from mlx_kda.kernels.sources import SOURCES, kernel
from mlx_kda.ops import reference64 as oracle
from mlx_kda.ops.gates import Gate

KERNELS = ("recurrent", "chunk")
DTYPES = ("float32", "float16", "bfloat16")


def close(got, truth, bound=OP_FLOAT32):
    for name, x, t in zip("oS", got, truth, strict=True):
        assert oracle.error(x, t) < bound, name


def raw_call(name, layer, runner="emulator", dtype="float32", **options):
    """A layer's raw gate and beta through a prefill kernel: (o, S), and the oracle's."""
    q, k, v = layer.mixed()
    kind = getattr(mx, dtype)
    arrays = [f32(x).astype(kind) for x in (q, k, v, layer.a, layer.b)]
    o, S = OPS[name](
        *arrays,
        state=f32(layer.state),
        gate=gate_of(layer),
        beta_kind=layer.beta_kind,
        runner=runner,
        **options,
    )
    q, k, v = (numpy(x).astype(np.float64) for x in arrays[:3])
    truth = oracle.recurrence(q, k, v, layer.gate(), layer.beta(), state=layer.state)
    return (numpy(o), numpy(S)), truth


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("beta_kind", ["sigmoid", "twice"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_a1_a4_raw_gates_per_channel(name, lower_bound, beta_kind):
    """Cases A1, A4: both gates and both betas inside the kernel, dt_bias ~ U(-6, 2) a channel."""
    layer = layer64.make(T=37, H=2, Hv=4, lower_bound=lower_bound, beta_kind=beta_kind)
    close(*raw_call(name, layer))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a1_raw_gates_in_16_bits(name, dtype):
    """Case A1: a and b in the activations' dtype, A_log and dt_bias in float32."""
    layer = layer64.make(T=20, rounded=rounded(dtype))
    (o, S), truth = raw_call(name, layer, dtype=dtype)
    assert oracle.error(S, truth[1]) < OP_FLOAT32
    assert oracle.error(o, truth[0]) < ROUNDED_ONCE * oracle.error(
        rounded(dtype)(truth[0]), truth[0]
    )


@pytest.mark.parametrize("name", KERNELS)
def test_a4_zero_parameters(name):
    """Case A4: A_log = a = dt_bias = 0 leaves exp(-0.6931), or exp(-2.5) with the bound -5."""
    zero = mx.zeros((1, 1, 2, 32))
    for bound, g in ((None, -np.log(2)), (-5.0, -2.5)):
        gates = Gate(mx.zeros((2,)), mx.zeros((64,)), bound)
        _, S = OPS[name](
            *(zero, zero, zero, zero, mx.zeros((1, 1, 2))),
            state=mx.ones((1, 2, 32, 32)),
            gate=gates,
            runner="emulator",
        )
        assert np.allclose(numpy(S), np.exp(g), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("a,dt_bias", [(-20.0, 0.0), (0.0, -20.0), (-80.0, 0.0), (60.0, 0.0)])
def test_a4_softplus_at_its_ends(name, a, dt_bias):
    """Case A4, siblings: softplus(-20) is 2e-9, not 0; softplus(60) is 60, not infinity.

    A softplus of 0 would leave a state 8e-4 too large.
    """
    shape = (1, 1024, 1, 32)
    zero = mx.zeros(shape)
    gates = Gate(mx.full((1,), 6.0), mx.full((32,), dt_bias))
    state = mx.ones((1, 1, 32, 32))
    _, S = OPS[name](
        *(zero, zero, zero, mx.full(shape, a), mx.zeros((1, 1024, 1))),
        state=state,
        gate=gates,
        runner="emulator-fast",
    )
    g = -np.exp(6.0) * np.logaddexp(a + dt_bias, 0)
    assert np.abs(numpy(S) - np.exp(1024 * g)).max() < 1e-4


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_a3_scale_is_applied_once(name, scale):
    """Case A3: Dk = 64, Dv = 128; slope 1 against the reference; explicit scales count."""
    x = oracle.make("random", T=40, H=1, Dk=64, Dv=128)
    o, _ = run(name, x, scale=scale)
    truth, _ = oracle.recurrence(*x.arrays(), scale=64**-0.5 if scale is None else scale)
    assert abs((o * truth).sum() / (truth**2).sum() - 1) < 1e-5


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a5_slow_decay_is_not_rounded(name, dtype):
    """Case A5: 4,096 tokens at g = -8e-5 leave 0.7206 of the state; rounded decay leaves 1."""
    zero = mx.zeros((1, 4096, 1, 32), dtype=getattr(mx, dtype))
    _, S = OPS[name](
        *(zero, zero, zero, mx.full(zero.shape, -8e-5), mx.zeros((1, 4096, 1))),
        state=mx.ones((1, 1, 32, 32)),
        runner="emulator-fast",
    )
    assert abs(mx.linalg.norm(S).item() / 32 - 0.7206) < 2e-4


@pytest.mark.parametrize("name", KERNELS)
def test_a6_the_state_stays_float32_in_single_steps(name):
    """Case A6: bfloat16 inputs, 512 single steps, g = -1e-3; a half state is 8 % wrong."""
    x = as_dtype(oracle.make("random", T=512, H=1, Dk=32, Dv=32), "bfloat16")
    x = oracle.Inputs(x.q, x.k, x.v, np.full_like(x.g, -1e-3), x.beta)
    truth = oracle.recurrence(*x.arrays())[1]
    S = np.zeros(truth.shape, np.float32)
    for t in range(512):
        now = x.slice(t, t + 1)
        now = oracle.Inputs(*now.arrays(), S)
        _, S = run(name, now, "bfloat16", runner="emulator-fast")
    assert oracle.error(S, truth) < OP_LONG


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("Dk,Dv", [(32, 32), (32, 96), (96, 32)])
def test_a7_the_state_is_values_by_keys(name, Dk, Dv):
    """Case A7: S[i, j] = i + 0.01 j, no decay, nothing written: o = S q; a square S hides it."""
    S = (np.arange(Dv)[:, None] + 0.01 * np.arange(Dk)[None]).astype(np.float32)
    q = np.random.default_rng(0).standard_normal((1, 1, 1, Dk)).astype(np.float32)
    one = np.ones((1, 1, 1, Dk), np.float32)
    x = oracle.Inputs(q, one, np.ones((1, 1, 1, Dv), np.float32), 0 * one, 0 * one[..., 0])
    x = oracle.Inputs(*x.arrays(), S[None, None])
    o, after = run(name, x, scale=1.0)
    assert oracle.error(o[0, 0, 0], S.astype(np.float64) @ q[0, 0, 0]) < OP_FLOAT32
    assert np.array_equal(after[0, 0], S)


@pytest.mark.parametrize("first", KERNELS)
@pytest.mark.parametrize("second", KERNELS)
def test_a7_any_kernel_goes_on_from_any_other(first, second):
    """Case A7: prefill 200 with one kernel, 100 more with another, Dk != Dv."""
    x = oracle.make("collinear", T=300, H=1, Dk=32, Dv=64)
    o, S = oracle.recurrence(*x.arrays())
    _, state = run(first, x.slice(0, 200), runner="emulator-fast")
    rest = oracle.Inputs(*x.slice(200, 300).arrays(), state)
    close(run(second, rest, runner="emulator-fast"), (o[:, 200:], S))


@pytest.mark.parametrize("name", KERNELS)
def test_a9_inputs_are_never_written_to(name):
    """Case A9: every argument holds the same numbers after the call."""
    x = oracle.make("mixed", T=20, B=2, H=1, Hv=2, Dk=32, Dv=32).with_state()
    arrays = [mx.array(a) for a in (*x.arrays(), x.state)]
    mx.eval(OPS[name](*arrays[:5], state=arrays[5], lengths=mx.array([20, 7]), runner="emulator"))
    for now, before in zip(arrays, (*x.arrays(), x.state), strict=True):
        assert np.array_equal(np.array(now), before)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("d", [1, 2, 5, 5.6, 8, 20, 80])
def test_b1_constant_deep_gates_do_not_overflow(name, d):
    """Case B1: exp(-cumsum g) overflows; a product of decays cannot."""
    x = oracle.make("random", T=129, H=1, Dk=32, Dv=64)
    x = oracle.Inputs(x.q, x.k, x.v, np.full_like(x.g, -d), x.beta)
    close(run(name, x), oracle.recurrence(*x.arrays()), OP_LONG)


@pytest.mark.parametrize("mode", ["recurrent", "exact", "half"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_b1_one_fast_channel_beside_slow_ones(mode, dtype):
    """Case B1: one channel at -80 beside -1e-3, in every activation dtype and mode."""
    if mode == "half" and dtype == "float32":
        assert not supported(32, 64, mx.float32, mode="half")[0]
        return
    x = as_dtype(oracle.make("random", T=129, H=1, Dk=32, Dv=64), dtype)
    g = np.full_like(x.g, -1e-3)
    g[..., 3] = -80
    x = oracle.Inputs(x.q, x.k, x.v, g, x.beta)
    o, S = oracle.recurrence(*x.arrays())
    name, options = ("recurrent", {}) if mode == "recurrent" else ("chunk", {"mode": mode})
    got = run(name, x, dtype, **options)
    loss = 1e-3 if mode == "half" else OP_LONG
    rounding = {"float32": 0, "float16": 3e-4, "bfloat16": 2.2e-3}[dtype]
    assert oracle.error(got[0], o) < loss + rounding
    assert oracle.error(got[1], S) < loss


def test_b3_one_chunk_size_and_any_segment():
    """Case B3: T = 1000 in segments of 16 to 1008 tokens is the same."""
    x = oracle.make("collinear", T=1000, H=1, Dk=32, Dv=32)
    truth = oracle.recurrence(*x.arrays())
    first = run("chunk", x, runner="emulator-fast")
    close(first, truth)
    for segment in (16, 48, 512, 1008):
        again = run("chunk", x, runner="emulator-fast", segment=segment)
        assert all(np.array_equal(a, b) for a, b in zip(again, first, strict=True))


TAILS = (1, 3, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("poison", [np.nan, 1e30])
@pytest.mark.parametrize("T", TAILS)
def test_b4_tails_with_poison_behind_them(name, poison, T):
    """Case B4: a tail chunk spoils the final state; what lies past the length must not matter."""
    x = oracle.make("collinear", T=T, H=1, Dk=32, Dv=32, seed=T).with_state()
    truth = oracle.recurrence(*x.arrays(), state=x.state)
    longer = []
    for a in x.arrays():
        behind = np.full((1, 20, *a.shape[2:]), poison, np.float32)
        longer.append(np.concatenate([a, behind], axis=1))
    poisoned = oracle.Inputs(*longer, x.state)
    o, S = run(name, poisoned, lengths=[T])
    close((o[:, :T], S), truth)
    assert not o[:, T:].any()
    again = oracle.make("random", T=1, H=1, Dk=32, Dv=32)
    close(
        run(name, oracle.Inputs(*again.arrays(), S), runner="emulator-fast"),
        oracle.recurrence(*again.arrays(), state=truth[1]),
    )


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("T", [500, 1000])
def test_b4_long_tails(name, T):
    """Case B4: 500 and 1,000 tokens, over several segments."""
    x = oracle.make("collinear", T=T, H=1, Dk=32, Dv=32).with_state()
    truth = oracle.recurrence(*x.arrays(), state=x.state)
    close(run(name, x, runner="emulator-fast"), truth)


@pytest.mark.parametrize("mode", ["recurrent", "exact", "half"])
def test_b4_c3_a_ragged_batch(mode):
    """Cases B4, C3: rows of 0, 9, 37 and 64 tokens (one length past T), poison behind each."""
    lengths = [0, 9, 37, 80]
    x = oracle.make("mixed", T=64, B=4, H=1, Hv=2, Dk=32, Dv=32).with_state()
    x = as_dtype(x, "float16") if mode == "half" else x
    o, S = oracle.recurrence(*x.arrays(), state=x.state, lengths=lengths)
    for a in x.arrays():
        for b, n in enumerate(lengths):
            a[b, n:] = np.nan
    if mode == "recurrent":
        got = run("recurrent", x, lengths=lengths)
    elif mode == "exact":
        got = run("chunk", x, lengths=lengths)
    else:
        got = run("chunk", x, "float16", lengths=lengths, mode="half")
    close(got, (o, S), 1e-3 if mode == "half" else OP_FLOAT32)
    for b, n in enumerate(lengths):
        assert not got[0][b, n:].any()
    assert np.array_equal(got[1][0], x.state[0])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("split", [[200, 100], [63, 237], [64, 236], [2, 298], [299, 1], [1] * 300])
def test_c1_split_anywhere(name, split):
    """Case C1: 300 tokens split anywhere give the same outputs and state."""
    x = oracle.make("collinear", T=300, H=1, Dk=32, Dv=32).with_state()
    whole = run(name, x, runner="emulator-fast")
    S, parts, start = x.state, [], 0
    for n in split:
        part = oracle.Inputs(*x.slice(start, start + n).arrays(), S)
        o, S = run(name, part, runner="emulator-fast")
        parts.append(o)
        start += n
    close((np.concatenate(parts, axis=1), S), whole, SPLIT)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("lengths", [[50, 50, 50], [0, 21, 50]])
def test_c1_segments_of_a_batch(name, lengths):
    """Case C1: several launches over several rows; each finds its row's tokens."""
    x = oracle.make("mixed", T=50, B=3, H=1, Hv=2, Dk=32, Dv=32).with_state()
    truth = oracle.recurrence(*x.arrays(), state=x.state, lengths=lengths)
    close(run(name, x, lengths=lengths, segment=16), truth)


@pytest.mark.parametrize("name", KERNELS)
def test_c14_no_tokens(name):
    """Case C14: T = 0 gives no output and the state as it was."""
    x = oracle.make("random", T=1, H=1, Dk=32, Dv=32).with_state()
    empty = oracle.Inputs(*x.slice(0, 0).arrays(), x.state)
    o, S = run(name, empty)
    assert o.shape == (1, 0, 1, 32) and np.array_equal(S, x.state)


@pytest.mark.parametrize("name", KERNELS)
def test_g3_odd_shapes_a_hundred_times(name):
    """Case G3: shapes not divisible by a tile, 100 runs, identical results."""
    x = oracle.make("mixed", T=21, B=1, H=1, Hv=3, Dk=96, Dv=32).with_state()
    first = run(name, x)
    for _ in range(100):
        again = run(name, x, runner="emulator-fast")
        assert all(np.array_equal(a, b) for a, b in zip(again, first, strict=True))


def test_g9_shapes_do_not_compile_kernels():
    """Case G9: T, B, lengths and even a batch of one token and head reuse what was compiled."""
    made = {name: kernel(name, "emulator-fast").launcher().programs for name in SOURCES}
    shapes = [(1, 1), (1, 2), (1, 9), (3, 16), (1, 33), (9, 5), (2, 300)]
    seen = []
    for B, T in shapes:
        x = oracle.make("random", T=T, B=B, H=1, Dk=64, Dv=96)
        for name in KERNELS:
            run(name, x, runner="emulator-fast")
            run(name, x, runner="emulator-fast", lengths=[1] * B)
        seen.append({name: len(programs) for name, programs in made.items()})
    assert all(counts == seen[0] for counts in seen)
