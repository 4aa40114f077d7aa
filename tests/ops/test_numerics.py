"""Every path of the op against the float64 oracle, on the inputs that hide mistakes."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from tolerances import CHUNK_OVER_SEQUENTIAL, OP_FLOAT32, OP_LONG, OUTPUT_ROUNDING, SPLIT

from mlx_kda.attention import kda
from mlx_kda.ops import CHUNKS, kda_chunk_ref, kda_ref, spans
from mlx_kda.ops import reference64 as oracle
from mlx_kda.ops.inputs import CheckedInputs

kda_step = partial(kda, path="step")
PATHS = ("reference", "step", "chunk")


def run(path, x: oracle.Inputs, **options):
    """(o, state) as numpy float64-ready arrays."""
    arrays = [None if a is None else mx.array(a) for a in x.arrays()]
    if x.state is not None:
        options["state"] = mx.array(x.state)
    if isinstance(path, int):
        o, S = kda_chunk_ref(*arrays, chunk=path, **options)
    else:
        o, S = kda(*arrays, path=path, **options)
    assert S.dtype == mx.float32
    return np.array(o.astype(mx.float32)), np.array(S)


@pytest.mark.parametrize("row", oracle.ROWS)
def test_sequential_loop_is_the_oracle(row):
    x = oracle.make(row, Dk=128, Dv=64)
    o, S = oracle.recurrence(*x.arrays())
    got = run("reference", x)
    assert oracle.error(got[0], o) < OP_FLOAT32
    assert oracle.error(got[1], S) < OP_FLOAT32


@pytest.mark.parametrize("row", oracle.ROWS)
def test_default_chunk_meets_the_bar(row):
    """At most 5 x the error of a sequential float32 loop in numpy, for output and state."""
    x = oracle.make(row)
    truth = oracle.recurrence(*x.arrays())
    sequential = oracle.recurrence(*x.arrays(), dtype=np.float32)
    for name, got, seq, t in zip("oS", run("chunk", x), sequential, truth, strict=True):
        bar = CHUNK_OVER_SEQUENTIAL * oracle.error(seq, t)
        assert oracle.error(got, t) <= bar, name


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("row", oracle.ROWS)
def test_every_chunk_size_meets_the_bar(row, chunk):
    """The same against this package's own sequential loop, summed as MLX sums."""
    x = oracle.make(row)
    truth = oracle.recurrence(*x.arrays())
    for got, seq, t in zip(run(chunk, x), run("reference", x), truth, strict=True):
        assert oracle.error(got, t) <= CHUNK_OVER_SEQUENTIAL * oracle.error(seq, t)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("delta_rule", [True, False])
@pytest.mark.parametrize("gate", ["channel", "head", "none"])
@pytest.mark.parametrize("heads", [(2, 2), (1, 3)])
def test_the_lineage(path, delta_rule, gate, heads):
    """KDA, Gated DeltaNet, DeltaNet, linear attention; Hv > H, Dk != Dv, from a state."""
    H, Hv = heads
    x = oracle.make("collinear", T=45, B=2, H=H, Hv=Hv, Dk=48, Dv=24).with_state()
    g = {"channel": x.g, "head": x.g[..., 0], "none": None}[gate]
    x = oracle.Inputs(x.q, x.k, x.v, g, x.beta, x.state)
    o, S = oracle.recurrence(*x.arrays(), state=x.state, delta_rule=delta_rule)
    got = run(path, x, delta_rule=delta_rule)
    assert oracle.error(got[0], o) < OP_FLOAT32
    assert oracle.error(got[1], S) < OP_FLOAT32


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("Dk,Dv", [(7, 5), (1, 1), (33, 100), (256, 32)])
def test_any_head_size(path, Dk, Dv):
    x = oracle.make("mixed", T=19, H=1, Dk=Dk, Dv=Dv)
    o, S = oracle.recurrence(*x.arrays())
    got = run(path, x)
    assert oracle.error(got[0], o) < OP_FLOAT32
    assert oracle.error(got[1], S) < OP_FLOAT32


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("d", [1, 2, 5, 5.6, 8, 20, 80])
def test_b1_constant_deep_gates_do_not_overflow(path, d):
    """Case B1: exp(-cumsum g) overflows; a product of decays cannot."""
    x = oracle.make("random", T=129, Dk=32, Dv=48)
    x = oracle.Inputs(x.q, x.k, x.v, np.full_like(x.g, -d), x.beta)
    o, S = oracle.recurrence(*x.arrays())
    got = run(path, x)
    assert oracle.error(got[0], o) < OP_LONG
    assert oracle.error(got[1], S) < OP_LONG


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_b1_one_fast_channel_beside_slow_ones(path, dtype):
    """Case B1: one channel at -80 beside -1e-3, in every activation dtype."""
    x = oracle.make("random", T=129, Dk=32, Dv=48)
    g = np.full_like(x.g, -1e-3)
    g[..., 3] = -80
    q, k, v, beta = (mx.array(a).astype(getattr(mx, dtype)) for a in (x.q, x.k, x.v, x.beta))
    o, S = kda(q, k, v, mx.array(g), beta, path=path)
    assert o.dtype == getattr(mx, dtype) and S.dtype == mx.float32
    rounded = [np.array(a.astype(mx.float32)) for a in (q, k, v, beta)]
    truth = oracle.recurrence(*rounded[:3], g, rounded[3])
    assert oracle.error(np.array(o.astype(mx.float32)), truth[0]) < OP_LONG + OUTPUT_ROUNDING[dtype]
    assert oracle.error(np.array(S), truth[1]) < OP_LONG


@pytest.mark.parametrize("chunk", CHUNKS)
def test_b2_inverse_is_scored_below_the_diagonal(chunk):
    """Case B2: what a repeated key and beta ~ 1 do to (I + diag(beta) N)^-1, diagonal left out."""
    x = oracle.make("repeated", T=chunk, H=1)
    inputs = CheckedInputs(*(mx.array(a) for a in x.arrays()))
    span = spans.prepare_chunks(inputs, chunk)
    K, G = x.k[0, :, 0].astype(np.float64), np.cumsum(x.g[0, :, 0].astype(np.float64), 0)
    N = np.tril(np.einsum("id,jd,ijd->ij", K, K, np.exp(G[:, None] - G[None])), -1)
    truth = np.linalg.inv(np.eye(chunk) + x.beta[0, :, 0, None].astype(np.float64) * N)
    below = np.tril(np.ones((chunk, chunk), bool), -1)
    assert oracle.error(np.array(span.solve[0])[below], truth[below]) < OP_FLOAT32
    assert np.array_equal(np.array(span.solve[0])[~below], np.eye(chunk)[~below])


def test_b3_every_chunk_size_gives_the_same_result():
    """Case B3: T = 1000 in chunks of 8, 16, 32 and 64."""
    x = oracle.make("mixed", T=1000, H=1, Dk=32, Dv=16)
    first = run(CHUNKS[0], x)
    for chunk in CHUNKS[1:]:
        for got, want in zip(run(chunk, x), first, strict=True):
            assert oracle.error(got, want) < OP_FLOAT32


@pytest.mark.parametrize("chunk", [0, 1, 4, 12, 15, 128])
def test_b3_an_unsupported_chunk_size_raises(chunk):
    """Case B3: a size that is not built is refused by number."""
    x = oracle.make("random", T=4, Dk=8, Dv=8)
    with pytest.raises(ValueError, match=f"chunk must be one of .*, got {chunk}"):
        run(chunk, x)


TAILS = (1, 3, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 500, 1000)


@pytest.mark.parametrize("T", TAILS)
def test_b4_the_tail_does_not_spoil_the_state(T):
    """Case B4: output, final state and one more token are right at every tail length."""
    x = oracle.make("collinear", T=T + 1, H=1, Dk=32, Dv=16)
    o, S = oracle.recurrence(*x.arrays())
    _, S_before = oracle.recurrence(*x.slice(0, T).arrays())
    for path in PATHS if T < 200 else ("chunk",):
        head = run(path, x.slice(0, T))
        assert oracle.error(head[0], o[:, :T]) < OP_FLOAT32
        assert oracle.error(head[1], S_before) < OP_FLOAT32
        last = oracle.Inputs(*x.slice(T, T + 1).arrays(), state=head[1])
        step = run("auto", last)
        assert oracle.error(step[0], o[:, T:]) < OP_LONG
        assert oracle.error(step[1], S) < OP_FLOAT32


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("poison", [np.nan, 1e30, -np.inf])
def test_b4_a_ragged_batch_ignores_what_lies_past_each_length(path, poison):
    """Case B4: rows of 0, 1, 16, 29 and 40 tokens, everything past them poisoned."""
    lengths = np.array([0, 1, 16, 29, 40])
    x = oracle.make("mixed", T=40, B=5, H=1, Hv=2, Dk=16, Dv=24).with_state()
    arrays = [a.copy() for a in x.arrays()]
    for a in arrays:
        for b, n in enumerate(lengths):
            a[b, n:] = poison
    o, S = oracle.recurrence(*x.arrays(), state=x.state, lengths=lengths)
    got = run(path, oracle.Inputs(*arrays, state=x.state), lengths=mx.array(lengths))
    assert oracle.error(got[0], o) < OP_FLOAT32
    assert oracle.error(got[1], S) < OP_FLOAT32
    for b, n in enumerate(lengths):
        assert not got[0][b, n:].any()


@pytest.mark.parametrize("row", ["collinear", "mixed"])
@pytest.mark.parametrize(
    "splits", [[200, 100], [63, 237], [64, 236], [2, 298], [299, 1], [1] * 300]
)
def test_c1_the_op_split_anywhere(row, splits):
    """Case C1 for the op: 300 tokens in pieces give the result of one call."""
    x = oracle.make(row, T=300, H=1, Dk=32, Dv=16).with_state()
    whole = run("auto", x)
    outputs, S, start = [], x.state, 0
    for n in splits:
        o, S = run("auto", oracle.Inputs(*x.slice(start, start + n).arrays(), state=S))
        outputs.append(o)
        start += n
    assert oracle.error(np.concatenate(outputs, 1), whole[0]) < SPLIT
    assert oracle.error(S, whole[1]) < SPLIT


@pytest.mark.parametrize("fn", [kda_ref, kda_chunk_ref, kda])
@pytest.mark.parametrize("with_state", [True, False])
def test_no_tokens_change_nothing(fn, with_state):
    """Case C14 for the op: T = 0 gives an empty output and the state as it was."""
    x = oracle.make("random", T=0, B=2, H=1, Hv=2, Dk=8, Dv=4).with_state()
    state = mx.array(x.state) if with_state else None
    o, S = fn(*[mx.array(a) for a in x.arrays()], state=state)
    assert o.shape == (2, 0, 2, 4)
    assert np.array_equal(np.array(S), x.state if with_state else np.zeros_like(x.state))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("T", [5, 40])
def test_no_rows_are_no_mistake(path, T):
    """B = 0, a batch that all rows have left, gives empty results of the right shapes."""
    x = oracle.make("random", T=T, B=0, H=1, Hv=2, Dk=8, Dv=4)
    o, S = run(path, x)
    assert o.shape == (0, T, 2, 4) and S.shape == (0, 2, 4, 8)
