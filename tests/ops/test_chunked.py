"""The chunkwise form in every chunk size."""

import mlx.core as mx
import numpy as np
import pytest
from tolerances import CHUNK_OVER_SEQUENTIAL, OP_FLOAT32

from mlx_kda.ops import CHUNKS, kda_chunk_ref, kda_ref, spans
from mlx_kda.ops import reference64 as oracle
from mlx_kda.ops.inputs import CheckedInputs


def run(fn, x: oracle.Inputs, **options):
    return [np.array(y) for y in fn(*(mx.array(a) for a in x.arrays()), **options)]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("row", oracle.ROWS)
def test_every_chunk_size_meets_the_bar(row, chunk):
    """At most 5 x the error of this package's own sequential loop, summed as MLX sums."""
    x = oracle.make(row)
    truth = oracle.recurrence(*x.arrays())
    chunked, loop = run(kda_chunk_ref, x, chunk=chunk), run(kda_ref, x)
    for got, seq, t in zip(chunked, loop, truth, strict=True):
        assert oracle.error(got, t) <= CHUNK_OVER_SEQUENTIAL * oracle.error(seq, t)


def test_every_chunk_size_gives_the_same_result():
    x = oracle.make("mixed", T=1000, H=1, Dk=32, Dv=16)
    first = run(kda_chunk_ref, x, chunk=CHUNKS[0])
    for chunk in CHUNKS[1:]:
        for got, want in zip(run(kda_chunk_ref, x, chunk=chunk), first, strict=True):
            assert oracle.error(got, want) < OP_FLOAT32


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_inverse_is_right_below_the_diagonal(chunk):
    """What a repeated key and beta near 1 do to (I + diag(beta) N)^-1, whose diagonal hides it."""
    x = oracle.make("repeated", T=chunk, H=1)
    span = spans.prepare_chunks(CheckedInputs(*(mx.array(a) for a in x.arrays())), chunk)
    K, G = x.k[0, :, 0].astype(np.float64), np.cumsum(x.g[0, :, 0].astype(np.float64), 0)
    N = np.tril(np.einsum("id,jd,ijd->ij", K, K, np.exp(G[:, None] - G[None])), -1)
    truth = np.linalg.inv(np.eye(chunk) + x.beta[0, :, 0, None].astype(np.float64) * N)
    below = np.tril(np.ones((chunk, chunk), bool), -1)
    solve = np.array(span.solve[0])
    assert oracle.error(solve[below], truth[below]) < OP_FLOAT32
    assert np.array_equal(solve[~below], np.eye(chunk)[~below])


@pytest.mark.parametrize("chunk", [0, 1, 4, 12, 15, 128])
def test_an_unsupported_chunk_size_is_refused(chunk):
    x = oracle.make("random", T=4, Dk=8, Dv=8)
    with pytest.raises(ValueError, match=f"chunk must be one of .*, got {chunk}"):
        run(kda_chunk_ref, x, chunk=chunk)
