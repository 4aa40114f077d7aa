"""``metal_kernel``: what a runner's name means, what a call passes on, what it refuses."""

import traceback
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from helpers.launch import arguments, kernel

from mlx_kda.errors import UserError
from mlx_kda.runners import choose

DOUBLE = "uint i = thread_position_in_grid.x;\nout[i] = a[i] * 2.0f;"


def definition(runner="emulator-fast", **given):
    return kernel(DOUBLE, runner=runner, **given)


def call(a=None, **given):
    return {**arguments([mx.ones(8) if a is None else a], group=8), **given}


@pytest.mark.parametrize(
    "metal, cuda, expected", [(True, True, "metal"), (False, True, "cuda"), (False, False, None)]
)
def test_auto_is_the_gpu_that_mlx_has(monkeypatch, metal, cuda, expected):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    if expected:
        assert choose() == expected
    else:
        with pytest.raises(UserError, match="no GPU"):
            choose()


@pytest.mark.parametrize("runner, made_by", [("metal", "metal_kernel"), ("cuda", "cuda_kernel")])
def test_a_call_on_a_gpu_goes_straight_to_mlx(monkeypatch, runner, made_by):
    """Made once, called with what was given, with at most two frames of ours in between."""
    made, calls = [], []

    def make(**given):
        made.append(given)
        return lambda **given: calls.append((given, len(traceback.extract_stack()))) or ["y"]

    monkeypatch.setattr(getattr(mx, runner), "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, made_by, make)
    double = definition(runner)
    given = call(template=[("T", mx.float32)], init_value=1, stream=mx.cpu)
    for _ in range(2):
        assert double(**given) == ["y"]
    assert len(made) == 1 and made[0]["input_names"] == (["a"] if runner == "metal" else ["cuda_a"])
    passed, depth = calls[1]
    assert passed["grid"] == (8, 1, 1) and passed["stream"] == mx.cpu and passed["init_value"] == 1
    frames = depth - len(traceback.extract_stack()) - 1
    assert frames == (1 if runner == "metal" else 2)


def test_a_grid_that_cuda_cannot_run(monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"a grid \(20, 1, 1\) that the threadgroup \(8, 1, 1\)"):
        definition("cuda")(**call(mx.ones(20)))


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"inputs": []}, "`inputs` to have size 1 but got size 0"),
        ({"output_shapes": []}, "`output_shapes`"),
        ({"output_dtypes": []}, "`output_dtypes`"),
        ({"template": [("T", 2.5)]}, "Invalid template argument"),
    ],
)
def test_arguments_that_do_not_fit(wrong, words):
    with pytest.raises(ValueError, match=words):
        definition()(**call(**wrong))


@pytest.mark.parametrize(
    "runner, words",
    [
        ("opencl", "unknown runner 'opencl': choose one of auto, metal"),
        ("metal", "needs an Apple GPU"),
        ("cuda", "CUDA build"),
        ("auto", "no GPU"),
    ],
)
def test_a_runner_that_is_not_here(runner, words):
    if runner in ("metal", "cuda") and getattr(mx, runner).is_available():
        pytest.skip(f"this machine has {runner}")
    with pytest.raises(UserError, match=words):
        definition()(**call(), runner=runner)


def test_a_wrong_definition_is_refused():
    with pytest.raises(UserError, match="unknown runner"):
        definition("opencl")
    with pytest.raises(ValueError, match="at least one output"):
        definition(outputs="")


def test_a_compiled_function_cannot_be_emulated():
    with pytest.raises(UserError, match=r"mx\.compile"):
        mx.compile(lambda a: definition()(**call(a)))(mx.ones(8))


def test_a_gradient_is_refused_rather_than_zero():
    def loss(a):
        return definition()(**call(a))[0].sum()

    assert loss(mx.ones(8)).item() == 16
    with pytest.raises(ValueError, match="no gradient"):
        mx.grad(loss)(mx.ones(8))


def test_threads_may_call_one_kernel_together():
    """Kernels of one text share a compiled program, whose launches are taken in turn."""

    def once(n):
        return np.array(definition("emulator")(**call(mx.full((4096,), float(n))))[0])

    with ThreadPoolExecutor(4) as pool:
        for n, out in enumerate(pool.map(once, range(12))):
            assert (out == 2 * n).all()
