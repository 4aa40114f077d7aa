"""A whole layer between its projections by kernels: choice, agreement, warm-up."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import layer64
from helpers.kernels import f32, memory, numpy, parameters, rounded
from tolerances import OP_FLOAT32, ROUNDED_ONCE, SPLIT

from mlx_kda.kernels.layer import SHORT, choose, empty_memory, mix, warm_up
from mlx_kda.kernels.sources import SOURCES, kernel
from mlx_kda.ops import reference64 as oracle


def call(layer, mem, start=0, stop=None, dtype="float32", runner="emulator-fast", **options):
    kind = getattr(mx, dtype)
    arrays = (layer.q, layer.k, layer.v, layer.a, layer.b, layer.z)
    cut = [f32(a[:, start:stop]).astype(kind) for a in arrays]
    return mix(*cut, parameters(layer, dtype), mem, runner=runner, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "T,name", [(1, "kda_decode"), (8, "kda_decode"), (9, "kda_recurrent"), (40, "kda_chunk")]
)
def test_every_length_against_float64(T, name, dtype):
    layer = layer64.make(B=2, T=T, H=1, Hv=2, Dk=32, Dv=64, rounded=rounded(dtype), seed=T)
    assert choose(T, 32, 64, getattr(mx, dtype)).kernel == name
    lengths = [T, (T + 1) // 2]
    y, mem = call(layer, memory(layer, dtype), dtype=dtype, lengths=mx.array(lengths),
                  runner="emulator")  # fmt: skip
    truth_y, truth_S, windows = layer.run(lengths)
    if dtype == "float32":
        assert oracle.error(numpy(y), truth_y) < OP_FLOAT32
        assert oracle.error(numpy(mem.state), truth_S) < OP_FLOAT32
    else:
        # Prefill rounds q, k, v and o to the activations' dtype between its kernels.
        steps = 1 if name == "kda_decode" else 3
        bound = steps * ROUNDED_ONCE * oracle.error(rounded(dtype)(truth_y), truth_y)
        assert oracle.error(numpy(y), truth_y) < bound
    for got, truth in zip(mem[:3], windows, strict=True):
        assert np.array_equal(numpy(got), np.float32(truth))


@pytest.mark.parametrize(
    "split", [[200, 100], [63, 237], [64, 236], [2, 298], [299, 1], [9] * 33 + [3]]
)
def test_c1_split_anywhere_across_kernels(split):
    """Case C1: 300 tokens, cut so that decode, recurrent and chunked kernels take over."""
    layer = layer64.make(B=1, T=300, H=1, Dk=32, Dv=32)
    whole, end = call(layer, memory(layer))
    mem, parts, start = memory(layer), [], 0
    for n in split:
        y, mem = call(layer, mem, start, start + n)
        parts.append(numpy(y))
        start += n
    assert oracle.error(np.concatenate(parts, axis=1), numpy(whole)) < SPLIT
    for got, truth in zip(mem, end, strict=True):
        assert oracle.error(numpy(got), numpy(truth)) < SPLIT


def test_the_choice_says_why():
    assert choose(1, 128, 128, mx.bfloat16) == (
        "kda_decode",
        "T = 1 is at most 8: one launch for it all",
    )
    assert choose(SHORT, 128, 128, mx.bfloat16).kernel == "kda_recurrent"
    assert "half operands" in choose(SHORT + 1, 128, 128, mx.bfloat16, mode="half").reason
    for args, why in (
        ((0, 128, 128, mx.bfloat16), "no tokens"),
        ((1, 100, 128, mx.bfloat16), "Dk = 100 is not a multiple of 32"),
        ((99, 128, 512, mx.bfloat16), "Dv = 512 is not a multiple of 32"),
        ((99, 128, 128, mx.float32, 4, "half"), "half mode would lose"),
        ((99, 128, 128, mx.float32, 4, "fast"), "mode must be one of exact, half"),
        ((99, 128, 128, mx.float32, 12), "a convolution over 12 tokens"),
        ((1, 128, 128, mx.float32, 12), "a convolution over 12 tokens"),
        ((1, 128, 128, mx.int8), "activations are"),
    ):
        choice = choose(*args)
        assert choice.kernel is None and why in choice.reason


def test_no_kernel_is_an_error_that_says_why():
    layer = layer64.make(B=1, T=3, H=1, Dk=32, Dv=48)
    with pytest.raises(ValueError, match="no kernel for this layer: Dv = 48 is not a multiple"):
        call(layer, memory(layer))


def test_warm_up_compiles_all_that_a_layer_calls():
    """Case G9: after it no length, batch or lengths compile anything."""
    layer = layer64.make(B=1, T=1, H=2, Dk=64, Dv=64, conv_kernel=3)
    said = []
    p = parameters(layer)
    names = warm_up([p, p], mx.float32, runner="emulator-fast",
                    progress=lambda *x: said.append(x))  # fmt: skip
    assert [n.split()[0] for n in names] == ["kda_decode", "kda_recurrent", "kda_chunk"]
    assert said[0] == (0, 3, "kda_decode Dk=64 Dv=64") and said[-1] == (3, 3, "")
    made = [kernel(name, "emulator-fast").launcher().programs for name in SOURCES]
    before = [len(m) for m in made]
    for B, T in ((1, 1), (3, 2), (1, 8), (2, 9), (1, 16), (2, 17), (1, 600)):
        layer = layer64.make(B=B, T=T, H=2, Dk=64, Dv=64, conv_kernel=3)
        call(layer, empty_memory(p, B, mx.float32))
        call(layer, empty_memory(p, B, mx.float32), lengths=mx.array([1] * B))
    assert [len(m) for m in made] == before
