"""The router's kernel against the router's operations and float64."""

import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_kda.kernels.route import moe_route, supported
from mlx_kda.kernels.sources import MOE_SOURCES
from mlx_kda.layers.moe import route
from mlx_kda.runners import metal_kernel
from mlx_kda.runners.frontend import check, find_clang

CASES = {
    "the 48B's": {"experts": 256, "top_k": 8},
    "groups": {"experts": 64, "top_k": 6, "groups": 8, "kept_groups": 3},
    "groups of one": {"experts": 4, "top_k": 2, "groups": 4, "kept_groups": 2},
    "softmax": {"experts": 40, "top_k": 4, "activation": "softmax"},
    "not renormalised": {"experts": 33, "top_k": 3, "renormalize": False, "scale": 2.446},
    "all of them": {"experts": 8, "top_k": 8},
    "one": {"experts": 5, "top_k": 1, "scale": 1.5},
    "1,024": {"experts": 1024, "top_k": 16},
}


def draw(experts, tokens=5, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((tokens, experts)).astype(np.float32)
    # The real range of the 48B's bias: all choices lie close together.
    bias = rng.uniform(6.817, 7.063, experts).astype(np.float32)
    return mx.array(logits), mx.array(bias)


def by_expert(chosen, weights):
    order = np.argsort(np.array(chosen), axis=-1)
    return (
        np.take_along_axis(np.array(chosen), order, -1),
        np.take_along_axis(np.array(weights.astype(mx.float32)), order, -1),
    )


@pytest.mark.parametrize("case", CASES)
def test_it_chooses_and_weighs_as_the_operations_do(case):
    options = dict(CASES[case])
    logits, bias = draw(options.pop("experts"))
    got = by_expert(*moe_route(logits, bias, runner="emulator", **options))
    want = by_expert(*route(logits, bias, **options))
    assert np.array_equal(got[0], want[0])
    assert np.allclose(got[1], want[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("tokens", [1, 3, 300])
def test_no_token_goes_elsewhere(tokens):
    """256 experts, bias in (6.817, 7.063), against float64; a 16-bit bias moves half."""
    logits, bias = draw(256, tokens, seed=tokens)
    chosen, _ = moe_route(logits, bias, top_k=8, runner="emulator-fast")
    x = np.array(logits, np.float64)
    # float32 as both compute it: the choice itself is what must not differ.
    choice = np.float32(1 / (1 + np.exp(-x))) + np.array(bias)
    best = np.argsort(-choice, axis=-1, kind="stable")[:, :8]
    same = [set(a) == set(b) for a, b in zip(np.array(chosen), best, strict=True)]
    assert np.mean(same) > 0.99


def test_equal_choices_take_the_lower_expert():
    chosen, weights = moe_route(mx.zeros((2, 70)), mx.zeros((70,)), top_k=3, runner="emulator")
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert np.allclose(np.array(weights), 1 / 3)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_nan_chooses_no_expert_that_is_not_there(activation):
    """An index past the last expert would be a read out of bounds in the experts' products."""
    logits = mx.array([[np.nan] * 16, [np.nan] + [0.0] * 15], dtype=mx.float32)
    chosen, _ = moe_route(
        logits, mx.zeros((16,)), top_k=4, activation=activation, runner="emulator"
    )
    assert np.array(chosen).max() < 16


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_weights_come_out_in_the_activations_dtype(dtype):
    logits, bias = draw(16)
    _, weights = moe_route(logits, bias, top_k=4, dtype=dtype, runner="emulator")
    _, want = moe_route(logits, bias, top_k=4, runner="emulator")
    assert weights.dtype == dtype
    assert mx.array_equal(weights, want.astype(dtype))


def test_shapes_before_the_experts_are_kept():
    logits, bias = draw(12, tokens=6)
    chosen, weights = moe_route(logits.reshape(2, 3, 12), bias, top_k=2, runner="emulator")
    assert chosen.shape == weights.shape == (2, 3, 2)
    flat, _ = moe_route(logits, bias, top_k=2, runner="emulator")
    assert mx.array_equal(chosen.reshape(6, 2), flat)
    chosen, _ = moe_route(logits[:0], bias, top_k=2, runner="emulator")
    assert chosen.shape == (0, 2)


@pytest.mark.parametrize(
    "sizes,word",
    [((2048, 8), "2048 experts"), ((4, 5), "5 experts chosen"), ((10, 2, 3), "3 groups")],
)
def test_sizes_without_a_kernel_say_why(sizes, word):
    ok, reason = supported(*sizes)
    assert not ok and word in reason
    logits, bias = draw(sizes[0])
    with pytest.raises(ValueError, match=word):
        moe_route(logits, bias, top_k=sizes[1], groups=(*sizes, 1)[2], runner="emulator")


def test_wrong_dtypes_are_named():
    logits, bias = draw(8)
    with pytest.raises(ValueError, match="logits must be float32"):
        moe_route(logits.astype(mx.bfloat16), bias, top_k=2, runner="emulator")
    with pytest.raises(ValueError, match="bias must be float32"):
        moe_route(logits, bias[:4], top_k=2, runner="emulator")


@pytest.mark.skipif(find_clang() is None, reason="no clang and no ziglang wheel")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_it_passes_the_front_end(case, dtype):
    o = {"groups": 1, "kept_groups": 1, "activation": "sigmoid", "renormalize": True} | CASES[case]
    source = MOE_SOURCES["moe_route"]
    kernel = metal_kernel(
        name=source.name,
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        source=source.body,
        header=source.header,
    )
    template = [
        ("E", o["experts"]), ("K", o["top_k"]), ("GROUPS", o["groups"]),
        ("KEPT", o["kept_groups"]), ("SOFTMAX", o["activation"] == "softmax"),
        ("NORM", o["renormalize"]), ("OutT", dtype),
    ]  # fmt: skip
    inputs = [mx.zeros((64,)), mx.zeros((64,)), mx.zeros((1,))]
    report = check(kernel.generate(inputs, [mx.uint32, dtype], template))
    assert not report.diagnostics, "\n".join(map(str, report.diagnostics[:5]))


def test_threadgroup_memory_is_what_the_head_says():
    body = MOE_SOURCES["moe_route"].body
    assert re.findall(r"threadgroup float (\w+)\[(\w+)\]", body) == [
        ("choice_s", "E"),
        ("group_s", "GROUPS"),
    ]
    assert f"at most {4 * (1024 + 32):,}" in body
