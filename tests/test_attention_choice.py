"""What the op refuses, by name, and what it chooses."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.kernels import OPS
from tolerances import OP_FLOAT32

from mlx_kda import attention
from mlx_kda.attention import explain, kda
from mlx_kda.errors import UserError
from mlx_kda.layers import KimiDeltaAttention
from mlx_kda.ops import kda_chunk_ref, kda_ref
from mlx_kda.ops import reference64 as oracle

KERNELS = ("kda_recurrent", "kda_chunk")
EVERY_ENTRANCE = (kda, kda_ref, kda_chunk_ref, explain, OPS["recurrent"], OPS["chunk"])
SHAPES = {
    "q": (2, 5, 2, 32),
    "k": (2, 5, 2, 32),
    "v": (2, 5, 4, 64),
    "g": (2, 5, 4, 32),
    "beta": (2, 5, 4),
    "state": (2, 4, 64, 32),
    "lengths": (2,),
}


def arguments(**shapes):
    return {
        name: mx.zeros(shape, dtype=mx.int32 if name == "lengths" else mx.float32)
        for name, shape in (SHAPES | shapes).items()
    }


def inputs(Dk=32, **sizes):
    x = oracle.make("collinear", Dk=Dk, Dv=64, H=1, Hv=2, **sizes).with_state()
    return [mx.array(a) for a in x.arrays()], mx.array(x.state)


@pytest.mark.parametrize("fn", EVERY_ENTRANCE)
@pytest.mark.parametrize(
    "name,shapes",
    [
        ("q", {"q": (2, 5, 32)}),
        ("k", {"k": (2, 5, 2, 64)}),
        ("v", {"v": (2, 6, 4, 64)}),
        ("Hv", {"v": (2, 5, 3, 64), "beta": (2, 5, 3), "g": (2, 5, 3, 32)}),
        ("beta", {"beta": (2, 5, 4, 1)}),
        ("beta", {"beta": (2, 5)}),
        ("g", {"g": (2, 5, 2)}),
        ("g", {"g": (2, 5, 4, 1)}),
        ("state", {"state": (2, 4, 32, 64)}),
        ("lengths", {"lengths": (3,)}),
    ],
)
def test_a_wrong_shape_is_named(fn, name, shapes):
    with pytest.raises(ValueError, match=rf"^{name} .*\d"):
        fn(**arguments(**shapes))


@pytest.mark.parametrize(
    "name,dtype",
    [("q", mx.int32), ("g", mx.bfloat16), ("state", mx.float16), ("lengths", mx.float32)],
)
def test_a_wrong_dtype_is_named(name, dtype):
    args = arguments()
    args[name] = args[name].astype(dtype)
    with pytest.raises(ValueError, match=f"^{name} must be"):
        kda(**args)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("fn", EVERY_ENTRANCE)
def test_what_is_not_an_array_is_named(fn, name):
    args = arguments()
    args[name] = np.array(args[name])
    with pytest.raises(ValueError, match=f"^{name} must be an mx.array, got ndarray"):
        fn(**args)


def test_an_impossible_path_says_what_is_possible():
    arrays, _ = inputs(T=2)
    with pytest.raises(ValueError, match="path must be one of auto, .*'fastest'"):
        kda(*arrays, path="fastest")


@pytest.mark.parametrize("path", KERNELS)
def test_an_impossible_kernel_says_why(path):
    arrays, _ = inputs(T=4, Dk=48)
    with pytest.raises(ValueError, match="cannot run: Dk = 48 is not a multiple of 32"):
        kda(*arrays, path=path, runner="emulator")
    assert explain(*arrays, runner="emulator").path == "step"
    arrays, _ = inputs(T=4)
    with pytest.raises(UserError, match="no GPU for a Metal kernel"):
        kda(*arrays, path=path)
    with pytest.raises(UserError, match="unknown runner 'abacus'"):
        kda(*arrays, runner="abacus")


@pytest.mark.parametrize(
    "T,runner,path",
    [
        (1, "auto", "step"),
        (15, "auto", "step"),
        (16, "auto", "chunk"),
        (700, "auto", "chunk"),
        (1, "emulator", "kda_recurrent"),
        (16, "emulator", "kda_recurrent"),
        (17, "emulator", "kda_chunk"),
        (17, "ops", "chunk"),
    ],
)
def test_explain_tells_what_runs(T, runner, path):
    arrays, state = inputs(T=T)
    choice = explain(*arrays, state=state, runner=runner)
    assert choice.path == path and choice.reason
    if runner == "auto":
        assert "Apple GPU" in choice.reason
    asked = explain(*arrays, path="reference")
    assert asked.path == "reference" and "asked" in asked.reason


@pytest.fixture
def as_on_a_mac(monkeypatch):
    """The choice as on a Mac; a kernel that is run fails the test."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(attention, "_by_kernel", lambda *_: pytest.fail("a kernel was run"))


@pytest.mark.parametrize("T", [1, 5, 40])
def test_operations_are_operations_on_a_mac_too(as_on_a_mac, T):
    """The self-check's truth, and what takes over when it fails, must not be a kernel itself."""
    arrays, state = inputs(T=T)
    assert explain(*arrays, state=state).path in KERNELS
    assert explain(*arrays, state=state, runner="ops").path not in KERNELS
    layer = KimiDeltaAttention(16, 1, 32, conv_kernel=4, norm_eps=1e-5).eval()
    assert layer(mx.ones((1, T, 16))).shape == (1, T, 16)


@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("gate", ["channel", "none"])
@pytest.mark.parametrize("with_state", [True, False])
def test_the_gradient_of_a_kernel_is_that_of_the_operations(path, gate, with_state):
    (q, k, v, g, beta), state = inputs(T=19)
    args = {"q": q, "k": k, "v": v, "beta": beta}
    if gate == "channel":
        args["g"] = g
    if with_state:
        args["state"] = state

    def loss(args, path, runner):
        o, S = kda(**{"g": None, **args}, path=path, runner=runner)
        return (o**2).sum() + S.sum()

    got = mx.grad(loss)(args, path, "emulator-fast")
    want = mx.grad(loss)(args, "chunk", "auto")
    for name in args:
        assert oracle.error(np.array(got[name]), np.array(want[name])) < OP_FLOAT32, name
