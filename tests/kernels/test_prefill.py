"""The prefill kernels' own business: segments, half mode, launches, what they refuse and reuse."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.kernels import OPS, as_dtype, f32, numpy, rounded, run
from tolerances import HALF_OVER_ROUNDING, HALF_STATE, OP_FLOAT32

from mlx_kda.kernels.arguments import floats, in_device_memory, integers, launches
from mlx_kda.kernels.sources import SOURCES, kernel
from mlx_kda.ops import reference64 as oracle


def close(got, truth, bound=OP_FLOAT32):
    for name, x, t in zip("oS", got, truth, strict=True):
        assert oracle.error(x, t) < bound, name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("row", oracle.ROWS)
def test_half_mode(row, dtype):
    """float16 K~ and Q~: twice the rounding of the output, on correlated keys too."""
    x = as_dtype(oracle.make(row, H=1), dtype)
    o, S = oracle.recurrence(*x.arrays())
    got = run("chunk", x, dtype, mode="half")
    assert oracle.error(got[0], o) <= HALF_OVER_ROUNDING * oracle.error(rounded(dtype)(o), o)
    assert oracle.error(got[1], S) <= HALF_STATE


@pytest.mark.parametrize("row", oracle.CORRELATED)
def test_half_mode_does_not_drift(row):
    """4,096 tokens: rounding that entered the state (a half K^, say) would grow as sqrt(T)."""
    x = as_dtype(oracle.make(row, T=4096, H=1, Dk=64, Dv=32), "float16")
    o, S = oracle.recurrence(*x.arrays())
    got = run("chunk", x, "float16", mode="half", runner="emulator-fast")
    assert oracle.error(got[0], o) <= HALF_OVER_ROUNDING * oracle.error(rounded("float16")(o), o)
    assert oracle.error(got[1], S) <= HALF_STATE


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_mode_with_one_fast_channel_beside_slow_ones(dtype):
    x = as_dtype(oracle.make("random", T=129, H=1, Dk=32, Dv=64), dtype)
    x.g[...] = -1e-3
    x.g[..., 3] = -80
    o, S = oracle.recurrence(*x.arrays())
    got = run("chunk", x, dtype, mode="half")
    rounding = {"float16": 3e-4, "bfloat16": 2.2e-3}[dtype]
    assert oracle.error(got[0], o) < 1e-3 + rounding
    assert oracle.error(got[1], S) < 1e-3


def test_half_mode_of_a_ragged_batch():
    lengths = [0, 9, 37, 80]
    x = as_dtype(oracle.make("mixed", T=64, B=4, H=1, Hv=2, Dk=32, Dv=32).with_state(), "float16")
    o, S = oracle.recurrence(*x.arrays(), state=x.state, lengths=lengths)
    for a in x.arrays():
        for b, n in enumerate(lengths):
            a[b, n:] = np.nan
    got = run("chunk", x, "float16", lengths=lengths, mode="half")
    close(got, (o, S), 1e-3)
    for b, n in enumerate(lengths):
        assert not got[0][b, n:].any()
    assert np.array_equal(got[1][0], x.state[0])


def test_half_mode_is_refused_where_it_would_lose_digits():
    x = oracle.make("random", T=2, H=1, Dk=32, Dv=32)
    with pytest.raises(ValueError, match="half mode would lose most digits of float32"):
        OPS["chunk"](*[mx.array(a) for a in x.arrays()], mode="half", runner="emulator-fast")


def test_any_segment_gives_the_same_result():
    """T = 1000 in segments of 16 to 1008 tokens is the same."""
    x = oracle.make("collinear", T=1000, H=1, Dk=32, Dv=32)
    truth = oracle.recurrence(*x.arrays())
    first = run("chunk", x, runner="emulator-fast")
    close(first, truth)
    for segment in (16, 48, 512, 1008):
        again = run("chunk", x, runner="emulator-fast", segment=segment)
        assert all(np.array_equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize(
    "name,segment",
    [("recurrent", 0), ("recurrent", -16), *(("chunk", n) for n in (0, -16, 8, 100))],
)
def test_a_segment_that_does_not_fit_is_named(name, segment):
    """Launches of no tokens, and chunks of 16 that a segment would cut."""
    x = oracle.make("random", T=2, H=1, Dk=32, Dv=32)
    with pytest.raises(
        ValueError, match=rf"segment must be (positive|a multiple of 16 tokens), got {segment}"
    ):
        OPS[name](*[mx.array(a) for a in x.arrays()], segment=segment, runner="emulator-fast")


def test_launches_are_short_on_a_mac():
    """512 tokens each whatever the length; 8,192 on CUDA."""
    assert list(launches(1030, None, "metal")) == [(0, 512), (512, 512), (1024, 6)]
    assert list(launches(1030, None, "emulator", 16)) == list(launches(1030, None, "metal"))
    assert list(launches(9000, None, "cuda", 16)) == [(0, 8192), (8192, 808)]
    assert list(launches(33, 16, "metal", 16)) == [(0, 16), (16, 16), (32, 1)]


@pytest.mark.parametrize("Dk,Dv", [(48, 32), (32, 40), (288, 32), (16, 16)])
def test_an_unsupported_size_says_why(Dk, Dv):
    x = oracle.make("random", T=2, H=1, Dk=Dk, Dv=Dv)
    for fn in OPS.values():
        with pytest.raises(ValueError, match=r"D[kv] = \d+ is not a multiple of 32 from 32 to 256"):
            fn(*[mx.array(a) for a in x.arrays()], runner="emulator-fast")


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("argument", range(6))
def test_a_gradient_is_refused(name, argument):
    """A kernel has no gradient; a silent zero would train nothing."""
    x = oracle.make("random", T=3, H=1, Dk=32, Dv=32).with_state()
    arrays = [mx.array(a) for a in (*x.arrays(), x.state)]

    def loss(a):
        args = [*arrays[:argument], a, *arrays[argument + 1 :]]
        o, S = OPS[name](*args[:5], state=args[5], runner="emulator-fast")
        return o.sum() + S.sum()

    with pytest.raises(ValueError, match="has no gradient"):
        mx.grad(loss)(arrays[argument])


def prepared(row, T=16):
    """T and M of one chunk: ((kernel's, float64's), (kernel's, float64's)), each 16 x 16."""
    x = oracle.make(row, T=T, H=1, Dk=128)
    q, k, g, beta = (a[0, :, 0].astype(np.float64) for a in (x.q, x.k, x.g, x.beta))
    N, M = np.zeros((16, 16)), np.zeros((16, 16))
    for i in range(T):
        for j in range(i + 1):
            r = np.exp(g[j + 1 : i + 1].sum(axis=0))
            N[i, j] = (k[i] * k[j] * r).sum() * (i > j)
            M[i, j] = (q[i] * k[j] * r).sum()
    _, _, tri, _ = kernel("kda_chunk_prepare", "emulator")(
        inputs=[
            *(f32(x.q), f32(x.k), f32(x.g), *in_device_memory(None, None), f32(x.beta)),
            *(integers((T,) * 8), integers((T, 1, 1, 0, 1)), floats((1.0, 0.0))),
        ],
        template=[("OpT", mx.float32), ("Dk", 128), ("GATE", 2), ("BETA", 0), ("DELTA_RULE", True)],
        grid=(128, 1, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(1, 1, 4096), (1, 1, 2048), (1, 1, 384), (1, 1, 128)],
        output_dtypes=[mx.float32] * 4,
    )
    tiles = numpy(tri).reshape(6, 8, 8)
    full = [np.block([[t[0], np.zeros((8, 8))], [t[1], t[2]]]) for t in (tiles[:3], tiles[3:])]
    solve = np.linalg.inv(np.eye(16) + beta[:, None] * N) * beta
    return (full[0], solve), (full[1], M)


@pytest.mark.parametrize("row", oracle.ROWS)
def test_the_inverse_is_right_below_the_diagonal(row):
    """The unit diagonal dominates the matrix and hides a wrong inverse."""
    for got, truth in prepared(row):
        lower = np.tril(np.ones((16, 16)), -1) > 0
        scale = max(np.abs(truth[lower]).max(), 1e-3)
        assert np.abs(got - truth)[lower].max() < 2e-6 * scale
        assert np.abs(np.diag(got - truth)).max() < 1e-6
        assert not np.triu(got, 1).any()


def test_shapes_do_not_compile_kernels():
    """T, B, lengths and even a batch of one token and head reuse what was compiled."""
    made = {name: kernel(name, "emulator-fast").launcher().programs for name in SOURCES}
    shapes = [(1, 1), (1, 2), (1, 9), (3, 16), (1, 33), (9, 5), (2, 300)]
    seen = []
    for B, T in shapes:
        x = oracle.make("random", T=T, B=B, H=1, Dk=64, Dv=96)
        for name in OPS:
            run(name, x, runner="emulator-fast")
            run(name, x, runner="emulator-fast", lengths=[1] * B)
        seen.append({name: len(programs) for name, programs in made.items()})
    assert all(counts == seen[0] for counts in seen)
