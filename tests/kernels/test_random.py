"""Calls that hypothesis makes up, in the checked emulator: batches, lengths, splits, segments."""

from itertools import pairwise

import numpy as np
import pytest
from helpers.kernels import run
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import CHUNK_OVER_SEQUENTIAL, OP_FLOAT32

from mlx_kda.ops import reference64 as oracle

Dk, Dv = 64, 32


@st.composite
def calls(draw):
    """(inputs, what is past the lengths poisoned; lengths; the same, clean; cuts; segment)."""
    B, H = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    T = draw(st.sampled_from([1, 2, 15, 16, 17, 31, 33, 48, 50]))
    row, seed = draw(st.sampled_from(sorted(oracle.ROWS))), draw(st.integers(0, 99))
    x = oracle.make(row, T=T, B=B, H=H, Hv=H * draw(st.integers(1, 2)), Dk=Dk, Dv=Dv, seed=seed)
    x = x.with_state(seed)
    x.state[...] *= draw(st.sampled_from([0.0, 1.0, 100.0]))
    lengths = draw(st.lists(st.integers(-1, T + 1), min_size=B, max_size=B))
    poisoned = [a.copy() for a in x.arrays()]
    for a in poisoned:
        for b, n in enumerate(lengths):
            a[b, max(n, 0) :] = np.nan
    cuts = sorted({0, T, draw(st.integers(0, T))})
    return x, oracle.Inputs(*poisoned), lengths, cuts, draw(st.sampled_from([None, 16, 32]))


@pytest.mark.parametrize("kernel", ["recurrent", "chunk"])
@given(call=calls())
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_any_call_is_right(kernel, call):
    """At most 5 x a float32 loop (or a few roundings), zeros past a length, no fault."""
    x, poisoned, lengths, cuts, segment = call
    truth = oracle.recurrence(*x.arrays(), state=x.state, lengths=lengths)
    loop = oracle.recurrence(*x.arrays(), state=x.state, lengths=lengths, dtype=np.float32)
    outputs, S = [], x.state
    for start, stop in pairwise(cuts):
        part = oracle.Inputs(*poisoned.slice(start, stop).arrays(), S)
        o, S = run(kernel, part, lengths=[n - start for n in lengths], segment=segment)
        outputs.append(o)
    o = np.concatenate(outputs, axis=1)
    for got, t, f in zip((o, S), truth, loop, strict=True):
        bar = CHUNK_OVER_SEQUENTIAL * oracle.error(f, t)
        assert oracle.error(got, t) <= max(bar, OP_FLOAT32 / 10)
    for b, n in enumerate(lengths):
        assert not o[b, max(n, 0) :].any()
