"""The dispatcher and the Metal kernels: choice, reason, gradient, refusal."""

import mlx.core as mx
import numpy as np
import pytest
from tolerances import OP_FLOAT32

from mlx_kda import attention as dispatch
from mlx_kda.attention import explain, kda
from mlx_kda.errors import UserError
from mlx_kda.layers import KimiDeltaAttention
from mlx_kda.ops import reference64 as oracle

KERNELS = ("kda_recurrent", "kda_chunk")


def inputs(Dk=32, **sizes):
    x = oracle.make("collinear", Dk=Dk, Dv=64, H=1, Hv=2, **sizes).with_state()
    return x, [mx.array(a) for a in x.arrays()], mx.array(x.state)


@pytest.mark.parametrize("path", KERNELS)
def test_a_kernel_by_name_is_the_oracle(path):
    x, arrays, state = inputs(T=40)
    truth = oracle.recurrence(*x.arrays(), state=x.state)
    for got, want in zip(kda(*arrays, state=state, path=path, runner="emulator"), truth,
                         strict=True):  # fmt: skip
        assert oracle.error(np.array(got), want) < OP_FLOAT32


@pytest.mark.parametrize("T,path", [(1, "kda_recurrent"), (16, "kda_recurrent"), (17, "kda_chunk")])
def test_auto_takes_the_kernel_of_the_length(T, path):
    _, arrays, state = inputs(T=T)
    assert explain(*arrays, state=state, runner="emulator").path == path


@pytest.mark.parametrize("path", ["auto", *KERNELS])
@pytest.mark.parametrize("sizes", [{"B": 0, "T": 20}, {"B": 2, "T": 0}])
def test_an_empty_call_launches_nothing(path, sizes):
    """A grid of no threads is a fault in the emulator and undefined on a GPU."""
    _, arrays, state = inputs(**sizes)
    o, S = kda(*arrays, state=state, path=path, runner="emulator")
    assert o.shape == (sizes["B"], sizes["T"], 2, 64)
    assert np.array_equal(np.array(S), np.array(state))


def test_auto_on_the_cpu_says_why_it_takes_no_kernel():
    _, arrays, _ = inputs(T=40)
    assert explain(*arrays).path == "chunk"
    assert "Apple GPU" in explain(*arrays).reason


@pytest.fixture
def as_on_a_mac(monkeypatch):
    """The dispatcher's choice as on a Mac; a kernel that is run fails the test."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(dispatch, "_by_kernel", lambda *_: pytest.fail("a kernel was run"))


@pytest.mark.parametrize("T", [1, 5, 40])
def test_operations_are_operations_on_a_mac_too(as_on_a_mac, T):
    """The self-check's truth, and what takes over when it fails, must not be a kernel itself."""
    _, arrays, state = inputs(T=T)
    assert explain(*arrays, state=state).path in KERNELS
    assert explain(*arrays, state=state, runner="ops").path not in KERNELS
    layer = KimiDeltaAttention(16, 1, 32, conv_kernel=4, norm_eps=1e-5).eval()
    y = layer(mx.ones((1, T, 16)))
    assert y.shape == (1, T, 16)


@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("gate", ["channel", "none"])
@pytest.mark.parametrize("with_state", [True, False])
def test_the_gradient_of_a_kernel_is_that_of_the_operations(path, gate, with_state):
    _, (q, k, v, g, beta), state = inputs(T=19)
    given = {"g": g} if gate == "channel" else {}
    if with_state:
        given["state"] = state

    def loss(args, path, runner):
        o, S = kda(**{"g": None, **args}, path=path, runner=runner)
        return (o**2).sum() + S.sum()

    args = {"q": q, "k": k, "v": v, "beta": beta, **given}
    got = mx.grad(loss)(args, path, "emulator-fast")
    want = mx.grad(loss)(args, "chunk", "auto")
    for name in args:
        assert oracle.error(np.array(got[name]), np.array(want[name])) < OP_FLOAT32, name


@pytest.mark.parametrize("path", KERNELS)
def test_an_impossible_kernel_says_why(path):
    _, arrays, _ = inputs(T=4, Dk=48)
    with pytest.raises(ValueError, match="cannot run: Dk = 48 is not a multiple of 32"):
        kda(*arrays, path=path, runner="emulator")
    assert explain(*arrays, runner="emulator").path == "step"
    _, arrays, _ = inputs(T=4)
    with pytest.raises(UserError, match="no GPU for a Metal kernel"):
        kda(*arrays, path=path)
    with pytest.raises(UserError, match="unknown runner 'abacus'"):
        kda(*arrays, runner="abacus")
