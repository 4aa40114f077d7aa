"""What the prefill kernels refuse, by name: shapes, sizes, modes, segments, gradients."""

import mlx.core as mx
import pytest
from helpers.kernels import OPS

from mlx_kda.kernels.arguments import launches
from mlx_kda.ops import reference64 as oracle
from mlx_kda.ops.gates import Gate

KERNELS = ("recurrent", "chunk")


WRONG = {
    "q": {"q": (2, 5, 32)},
    "k": {"k": (2, 5, 2, 64)},
    "v": {"v": (2, 6, 4, 64)},
    "Hv": {"v": (2, 5, 3, 64), "beta": (2, 5, 3), "g": (2, 5, 3, 32)},
    "beta": {"beta": (2, 5, 4, 1)},
    "beta ": {"beta": (2, 5)},
    "g": {"g": (2, 5, 2)},
    "g ": {"g": (2, 5, 4, 1)},
    "state": {"state": (2, 4, 32, 64)},
    "lengths": {"lengths": (3,)},
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a9_a_wrong_shape_is_named(name, wrong):
    """Case A9: what was read out of bounds elsewhere is a ValueError that names the argument."""
    shapes = {
        "q": (2, 5, 2, 32),
        "k": (2, 5, 2, 32),
        "v": (2, 5, 4, 64),
        "g": (2, 5, 4, 32),
        "beta": (2, 5, 4),
        "state": (2, 4, 64, 32),
        "lengths": (2,),
    } | WRONG[wrong]
    args = {n: mx.zeros(s, dtype=mx.int32 if n == "lengths" else mx.float32)
            for n, s in shapes.items()}  # fmt: skip
    with pytest.raises(ValueError, match=rf"^{wrong.strip()} .*\d"):
        OPS[name](**args, runner="emulator-fast")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "A_log,dt_bias,g,message",
    [
        ((2,), (2,), (1, 3, 2, 32), "dt_bias must hold one value per channel.*got shape"),
        ((2,), (32,), (1, 3, 2, 32), "dt_bias must hold"),
        ((2,), (32, 2), (1, 3, 2, 32), "dt_bias must hold"),
        ((32,), (64,), (1, 3, 2, 32), "A_log must hold one value per head.*got shape"),
        ((), (64,), (1, 3, 2, 32), "A_log must hold"),
        ((2,), (64,), (1, 3, 2), "raw gate must be.*got shape"),
    ],
)
def test_a9_wrong_gate_parameters_are_named(name, A_log, dt_bias, g, message):
    """Case A9: dt_bias [H] or [Dk], A_log [Dk], a raw gate [B, T, H]."""
    x = mx.zeros((1, 3, 2, 32))
    with pytest.raises(ValueError, match=message):
        OPS[name](
            *(x, x, x, mx.zeros(g), mx.zeros((1, 3, 2))),
            gate=Gate(mx.zeros(A_log), mx.zeros(dt_bias)),
            runner="emulator-fast",
        )


@pytest.mark.parametrize(
    "name,segment",
    [
        ("recurrent", 0),
        ("recurrent", -16),
        ("chunk", 0),
        ("chunk", -16),
        ("chunk", 8),
        ("chunk", 100),
    ],
)
def test_b3_a_segment_that_does_not_fit_is_named(name, segment):
    """Case B3: launches of no tokens, and chunks of 16 that a segment would cut."""
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


def test_half_mode_is_refused_where_it_would_lose_digits():
    x = oracle.make("random", T=2, H=1, Dk=32, Dv=32)
    with pytest.raises(ValueError, match="half mode would lose most digits of float32"):
        OPS["chunk"](*[mx.array(a) for a in x.arrays()], mode="half", runner="emulator-fast")


@pytest.mark.parametrize("name", KERNELS)
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
