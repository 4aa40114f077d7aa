"""Every path of the op, operations and kernels alike, against the float64 oracle.

The kernels run in the checked emulator, which also reports races, stray accesses and divergence.
"""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from helpers.kernels import as_dtype, call, rounded
from tolerances import CHUNK_OVER_SEQUENTIAL, OP_FLOAT32, OP_LONG, ROUNDED_ONCE, SPLIT

from mlx_kda.attention import kda
from mlx_kda.ops import reference64 as oracle

KERNELS = ("kda_recurrent", "kda_chunk")
PATHS = ("reference", "step", "chunk", *KERNELS)
DTYPES = ("float32", "float16", "bfloat16")

every_path = pytest.mark.parametrize("path", PATHS)


def run(path, x: oracle.Inputs, dtype="float32", runner="emulator", **options):
    """(o, state) in numpy, for inputs that ``dtype`` can hold."""
    return call(kda, x, dtype, path=path, runner=runner if path in KERNELS else "auto", **options)


def check(got, truth, bound=OP_FLOAT32):
    for name, x, t in zip("oS", got, truth, strict=True):
        assert oracle.error(x, t) < bound, name


def check_bar(got, x: oracle.Inputs):
    """At most 5 x the error of a sequential float32 loop in numpy, for output and state."""
    truth = oracle.recurrence(*x.arrays(), state=x.state)
    sequential = oracle.recurrence(*x.arrays(), state=x.state, dtype=np.float32)
    for name, y, seq, t in zip("oS", got, sequential, truth, strict=True):
        assert oracle.error(y, t) <= CHUNK_OVER_SEQUENTIAL * oracle.error(seq, t), name


@every_path
@pytest.mark.parametrize("from_state", [False, True])
@pytest.mark.parametrize("row", oracle.ROWS)
def test_hard_inputs_meet_the_bar(path, row, from_state):
    x = oracle.make(row, H=1)
    x = x.with_state() if from_state else x
    check_bar(run(path, x), x)


@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("Dk,Dv", [(32, 128), (96, 64), (256, 32)])
@pytest.mark.parametrize("row", oracle.CORRELATED)
def test_keys_and_values_of_different_sizes_meet_the_bar(path, row, Dk, Dv):
    x = oracle.make(row, T=150, H=1, Dk=Dk, Dv=Dv, seed=3)
    check_bar(run(path, x), x)


@every_path
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("row", oracle.ROWS)
def test_16_bit_activations_cost_one_rounding_of_the_output(path, dtype, row):
    """Against the oracle on the same rounded inputs: the state stays exact."""
    x = as_dtype(oracle.make(row, T=130, H=1, Dk=64, Dv=32), dtype).with_state()
    o, S = oracle.recurrence(*x.arrays(), state=x.state)
    got = run(path, x, dtype)
    assert oracle.error(got[0], o) < ROUNDED_ONCE * oracle.error(rounded(dtype)(o), o)
    sequential = oracle.recurrence(*x.arrays(), state=x.state, dtype=np.float32)[1]
    assert oracle.error(got[1], S) <= CHUNK_OVER_SEQUENTIAL * oracle.error(sequential, S)


@every_path
@pytest.mark.parametrize("delta_rule", [True, False])
@pytest.mark.parametrize("gate", ["channel", "head", "none"])
@pytest.mark.parametrize("heads", [(2, 2), (1, 3)])
def test_the_lineage(path, delta_rule, gate, heads):
    """KDA, Gated DeltaNet, DeltaNet, linear attention; Hv > H, Dk != Dv, from a state."""
    H, Hv = heads
    x = oracle.make("collinear", T=45, B=2, H=H, Hv=Hv, Dk=64, Dv=32).with_state()
    g = {"channel": x.g, "head": x.g[..., 0], "none": None}[gate]
    x = oracle.Inputs(x.q, x.k, x.v, g, x.beta, x.state)
    truth = oracle.recurrence(*x.arrays(), state=x.state, delta_rule=delta_rule)
    check(run(path, x, delta_rule=delta_rule), truth)


@pytest.mark.parametrize("path", ["reference", "step", "chunk"])
@pytest.mark.parametrize("Dk,Dv", [(7, 5), (1, 1), (33, 100), (256, 32)])
def test_operations_take_any_head_size(path, Dk, Dv):
    x = oracle.make("mixed", T=19, H=1, Dk=Dk, Dv=Dv)
    check(run(path, x), oracle.recurrence(*x.arrays()))


@every_path
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_the_scale_is_applied_once(path, scale):
    """Slope 1 against the oracle where Dk != Dv; explicit scales count."""
    x = oracle.make("random", T=40, H=1, Dk=64, Dv=128)
    o, _ = run(path, x, scale=scale)
    truth, _ = oracle.recurrence(*x.arrays(), scale=64**-0.5 if scale is None else scale)
    assert abs((o * truth).sum() / (truth**2).sum() - 1) < 1e-5


@every_path
@pytest.mark.parametrize("dtype", DTYPES)
def test_slow_decay_is_not_rounded(path, dtype):
    """4,096 tokens at g = -8e-5 leave 0.7206 of the state; a rounded decay leaves 1."""
    zero = np.zeros((1, 4096, 1, 32), np.float32)
    state = np.ones((1, 1, 32, 32), np.float32)
    x = oracle.Inputs(zero, zero, zero, zero - np.float32(8e-5), zero[..., 0], state)
    _, S = run(path, x, dtype, runner="emulator-fast")
    assert abs(np.linalg.norm(S) / 32 - 0.7206) < 2e-4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "path,T", [*((path, 512) for path in PATHS if path != "step"), ("step", 4096)]
)
def test_the_state_stays_float32_in_single_steps(path, T, dtype):
    """16-bit inputs, one token at a time, g = -1e-3: a 16-bit state would be 8 % wrong."""
    x = as_dtype(oracle.make("random", T=T, H=1, Dk=32, Dv=32), dtype)
    x = oracle.Inputs(x.q, x.k, x.v, np.full_like(x.g, -1e-3), x.beta)
    _, truth = oracle.recurrence(*x.arrays())
    S = None
    for t in range(T):
        now = oracle.Inputs(*x.slice(t, t + 1).arrays(), S)
        _, S = run(path, now, dtype, runner="emulator-fast")
    assert oracle.error(S, truth) < OP_LONG


@every_path
@pytest.mark.parametrize("Dk,Dv", [(32, 32), (32, 96), (96, 32)])
def test_the_state_is_values_by_keys(path, Dk, Dv):
    """S[i, j] = i + 0.01 j, no decay, nothing written: o = S q."""
    S = (np.arange(Dv)[:, None] + 0.01 * np.arange(Dk)[None]).astype(np.float32)
    q = np.random.default_rng(0).standard_normal((1, 1, 1, Dk)).astype(np.float32)
    k, v = np.ones((1, 1, 1, Dk), np.float32), np.ones((1, 1, 1, Dv), np.float32)
    x = oracle.Inputs(q, k, v, 0 * k, 0 * k[..., 0], S[None, None])
    o, after = run(path, x, scale=1.0)
    assert oracle.error(o[0, 0, 0], S.astype(np.float64) @ q[0, 0, 0]) < OP_FLOAT32
    assert np.array_equal(after[0, 0], S)


@pytest.mark.parametrize("first", PATHS)
@pytest.mark.parametrize("second", PATHS)
def test_any_path_continues_from_any_other(first, second):
    """200 tokens by one path, 100 by another, Dk != Dv."""
    x = oracle.make("collinear", T=300, H=1, Dk=32, Dv=64)
    o, S = oracle.recurrence(*x.arrays())
    _, state = run(first, x.slice(0, 200), runner="emulator-fast")
    rest = oracle.Inputs(*x.slice(200, 300).arrays(), state)
    check(run(second, rest, runner="emulator-fast"), (o[:, 200:], S))


@every_path
def test_inputs_are_never_written_to(path):
    x = oracle.make("mixed", T=20, B=2, H=1, Hv=2, Dk=32, Dv=32).with_state()
    arrays = [mx.array(a) for a in (*x.arrays(), x.state)]
    lengths = mx.array([20, 7])
    runner = "emulator" if path in KERNELS else "auto"
    mx.eval(kda(*arrays[:5], state=arrays[5], lengths=lengths, path=path, runner=runner))
    for now, before in zip(arrays, (*x.arrays(), x.state), strict=True):
        assert np.array_equal(np.array(now), before)
    assert lengths.tolist() == [20, 7]


@every_path
@pytest.mark.parametrize("d", [1, 2, 5, 5.6, 8, 20, 80])
def test_constant_deep_gates_do_not_overflow(path, d):
    """``exp(-cumsum g)`` overflows; a product of decays cannot."""
    x = oracle.make("random", T=129, H=1, Dk=32, Dv=64)
    x = oracle.Inputs(x.q, x.k, x.v, np.full_like(x.g, -d), x.beta)
    check(run(path, x), oracle.recurrence(*x.arrays()), OP_LONG)


@every_path
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_fast_channel_beside_slow_ones(path, dtype):
    """One channel at -80 beside -1e-3, in every activation dtype."""
    x = as_dtype(oracle.make("random", T=129, H=1, Dk=32, Dv=64), dtype)
    g = np.full_like(x.g, -1e-3)
    g[..., 3] = -80
    x = oracle.Inputs(x.q, x.k, x.v, g, x.beta)
    o, S = oracle.recurrence(*x.arrays())
    got = run(path, x, dtype)
    rounding = {"float32": 0, "float16": 3e-4, "bfloat16": 2.2e-3}[dtype]
    assert oracle.error(got[0], o) < OP_LONG + rounding
    assert oracle.error(got[1], S) < OP_LONG


TAILS = (1, 3, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129)


@every_path
@pytest.mark.parametrize("T", TAILS)
@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_a_tail_and_what_lies_past_it(path, T, poison):
    """Padding enters neither output nor state at any tail length; one more token is right too."""
    x = oracle.make("collinear", T=T, H=1, Dk=32, Dv=32, seed=T).with_state()
    truth = oracle.recurrence(*x.arrays(), state=x.state)
    longer = []
    for a in x.arrays():
        behind = np.full((1, 20, *a.shape[2:]), poison, np.float32)
        longer.append(np.concatenate([a, behind], axis=1))
    o, S = run(path, oracle.Inputs(*longer, x.state), lengths=[T])
    check((o[:, :T], S), truth)
    assert not o[:, T:].any()
    last = oracle.make("random", T=1, H=1, Dk=32, Dv=32)
    got = run(path, oracle.Inputs(*last.arrays(), S), runner="emulator-fast")
    check(got, oracle.recurrence(*last.arrays(), state=truth[1]))


@pytest.mark.parametrize("path", ["chunk", *KERNELS])
@pytest.mark.parametrize("T", [500, 1000])
def test_long_tails(path, T):
    """Over several segments."""
    x = oracle.make("collinear", T=T, H=1, Dk=32, Dv=32).with_state()
    truth = oracle.recurrence(*x.arrays(), state=x.state)
    check(run(path, x, runner="emulator-fast"), truth)


@every_path
@pytest.mark.parametrize("poison", [np.nan, 1e30, -np.inf])
def test_a_ragged_batch(path, poison):
    """Rows of 0 to T tokens (one length beyond T), everything past them poisoned."""
    lengths = [0, 1, 16, 37, 80]
    x = oracle.make("mixed", T=64, B=5, H=1, Hv=2, Dk=32, Dv=32).with_state()
    truth = oracle.recurrence(*x.arrays(), state=x.state, lengths=lengths)
    for a in x.arrays():
        for b, n in enumerate(lengths):
            a[b, n:] = poison
    got = run(path, x, lengths=lengths)
    check(got, truth)
    for b, n in enumerate(lengths):
        assert not got[0][b, n:].any()
    assert np.array_equal(got[1][0], x.state[0])


@pytest.mark.parametrize("path", ["auto", *KERNELS])
@pytest.mark.parametrize("row", ["collinear", "mixed"])
@pytest.mark.parametrize("split", [[200], [63], [64], [2], [299], range(1, 300)])
def test_a_split_anywhere_changes_nothing(path, row, split):
    """300 tokens in pieces give the outputs and the state of one call."""
    x = oracle.make(row, T=300, H=1, Dk=32, Dv=32).with_state()
    whole = run(path, x, runner="emulator-fast")
    outputs, S = [], x.state
    for start, stop in pairwise([0, *split, 300]):
        part = oracle.Inputs(*x.slice(start, stop).arrays(), S)
        o, S = run(path, part, runner="emulator-fast")
        outputs.append(o)
    check((np.concatenate(outputs, 1), S), whole, SPLIT)


@pytest.mark.parametrize("path", ["auto", *PATHS])
@pytest.mark.parametrize("from_state", [True, False])
@pytest.mark.parametrize("B,T", [(2, 0), (0, 5), (0, 40)])
def test_an_empty_call_computes_nothing(path, from_state, B, T):
    """No tokens, or a batch that all rows have left: no launch, and the state as it was."""
    x = oracle.make("random", T=T, B=B, H=1, Hv=2, Dk=32, Dv=64)
    x = x.with_state() if from_state else x
    o, S = run(path, x)
    assert o.shape == (B, T, 2, 64)
    expected = x.state if from_state else np.zeros((B, 2, 64, 32))
    assert np.array_equal(S, expected)
