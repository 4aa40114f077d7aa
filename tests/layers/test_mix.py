"""A whole layer between its projections: what is chosen, agreement, warm-up."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import layer64
from helpers.kernels import layer_state, numpy, parameters, projections, rounded
from tolerances import OP_FLOAT32, ROUNDED_ONCE, SPLIT

from mlx_kda import doctor
from mlx_kda.kernels.sources import SOURCES, kernel
from mlx_kda.layers import KimiDeltaAttention
from mlx_kda.layers.mix import SHORT, choose
from mlx_kda.layers.padding import Padding
from mlx_kda.ops import reference64 as oracle


def call(layer, past, start=0, stop=None, dtype="float32", runner="emulator-fast", lengths=None):
    p, w = projections(layer, start, stop, dtype), parameters(layer, dtype)
    padding = None if lengths is None else Padding(mx.array(lengths))
    choice = choose(p.b.shape[1], w.Dk, w.Dv, w.conv_kernel, p.v.dtype, runner)
    return choice(p, w, past, padding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "T,name", [(1, "kda_decode"), (8, "kda_decode"), (9, "kda_recurrent"), (40, "kda_chunk")]
)
def test_every_length_against_float64(T, name, dtype):
    layer = layer64.make(B=2, T=T, H=1, Hv=2, Dk=32, Dv=64, rounded=rounded(dtype), seed=T)
    assert choose(T, 32, 64, 4, getattr(mx, dtype), "emulator").kernel == name
    lengths = [T, (T + 1) // 2]
    y, after = call(
        layer, layer_state(layer, dtype), dtype=dtype, lengths=lengths, runner="emulator"
    )
    truth_y, truth_S, windows = layer.run(lengths)
    if dtype == "float32":
        assert oracle.error(numpy(y), truth_y) < OP_FLOAT32
        assert oracle.error(numpy(after.state), truth_S) < OP_FLOAT32
    else:
        # Prefill rounds q, k, v and o to the activations' dtype between its kernels.
        steps = 1 if name == "kda_decode" else 3
        bound = steps * ROUNDED_ONCE * oracle.error(rounded(dtype)(truth_y), truth_y)
        assert oracle.error(numpy(y), truth_y) < bound
    for got, truth in zip(after[:3], windows, strict=True):
        assert np.array_equal(numpy(got), np.float32(truth))


@pytest.mark.parametrize(
    "split", [[200, 100], [63, 237], [64, 236], [2, 298], [299, 1], [9] * 33 + [3]]
)
def test_a_split_anywhere_changes_nothing(split):
    """300 tokens, cut so that decode, recurrent and chunked kernels take over from one another."""
    layer = layer64.make(B=1, T=300, H=1, Dk=32, Dv=32)
    whole, end = call(layer, layer_state(layer))
    past, parts, start = layer_state(layer), [], 0
    for n in split:
        y, past = call(layer, past, start, start + n)
        parts.append(numpy(y))
        start += n
    assert oracle.error(np.concatenate(parts, axis=1), numpy(whole)) < SPLIT
    for got, truth in zip(past, end, strict=True):
        assert oracle.error(numpy(got), numpy(truth)) < SPLIT


@pytest.mark.parametrize(
    "call,path,kernel,why",
    [
        ((1, 128, 128, 4, mx.bfloat16, "metal"), "kda_decode", True, "T = 1 is at most 8"),
        ((16, 128, 128, 4, mx.bfloat16, "metal"), "kda_recurrent", True, "hardly fill a chunk"),
        ((17, 128, 128, 4, mx.bfloat16, "metal"), "kda_chunk", True, "chunks of 16 tokens"),
        ((0, 128, 128, 4, mx.bfloat16, "metal"), "step", False, "no tokens"),
        ((1, 100, 128, 4, mx.bfloat16, "metal"), "step", False, "Dk = 100 is not a multiple"),
        ((99, 128, 512, 4, mx.bfloat16, "metal"), "chunk", False, "Dv = 512 is not a multiple"),
        ((99, 128, 128, 12, mx.float32, "metal"), "chunk", False, "over 12 tokens"),
        ((1, 128, 128, 12, mx.float32, "metal"), "step", False, "over 12 tokens"),
        ((1, 128, 128, 4, mx.int8, "metal"), "step", False, "activations are"),
        ((1, 128, 128, 4, mx.float32, "ops"), "step", False, "1 token"),
        ((40, 128, 128, 4, mx.float32, "ops"), "chunk", False, "fill chunks"),
        ((1, 128, 128, 4, mx.float32, "metal", True), "step", False, "training needs gradients"),
    ],
)
def test_the_choice_says_why(call, path, kernel, why):
    choice = choose(*call)
    assert choice.path == path and why in choice.reason
    assert choice.kernel == (path if kernel else None)


def test_the_choice_follows_runner_and_training():
    layer = KimiDeltaAttention(16, 1, 32, conv_kernel=4, norm_eps=1e-5).eval()
    kernels = []
    for runner, training in (("ops", 0), ("emulator", 0), ("emulator", 1), ("emulator", 0)):
        layer.runner = runner
        layer.train(bool(training))
        kernels.append(layer.choose(1, mx.float32).kernel)
    assert kernels == [None, "kda_decode", None, "kda_decode"]


def test_warm_up_compiles_all_that_a_layer_calls():
    """After it no length, batch or lengths compile anything."""
    made = [kernel(name, "emulator-fast").launcher().programs for name in SOURCES]
    layer = KimiDeltaAttention(16, 2, 64, conv_kernel=3, norm_eps=1e-5).eval()
    layer.runner = "emulator-fast"
    names = doctor.warm_up([layer, layer], mx.float32)
    assert [n.split()[0] for n in names] == ["kda_decode", "kda_recurrent", "kda_chunk"]
    before = [len(m) for m in made]
    w = layer.kernel_parameters()
    for B, T in ((1, 1), (3, 2), (1, 8), (2, 9), (1, SHORT), (2, SHORT + 1), (1, 600)):
        p = layer.project(mx.ones((B, T, 16)))
        for padding in (None, Padding(mx.array([1] * B))):
            layer.choose(T, mx.float32)(p, w, w.empty_state(B, mx.float32), padding)
    assert [len(m) for m in made] == before
