"""The self-check of the kernels: what it finds, remembers, and does about it."""

import json
from dataclasses import replace
from functools import partialmethod

import mlx.core as mx
import pytest
from helpers.tiny import tiny_model

from mlx_kda import doctor
from mlx_kda.cli.main import main
from mlx_kda.layers import KimiDeltaAttention, mix, moe


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache folder of its own; compiled kernels stay where they are."""
    monkeypatch.setattr(doctor, "cache_dir", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def layer():
    layer = KimiDeltaAttention(16, 1, 32, conv_kernel=4, norm_eps=1e-5)
    layer.dt_bias = mx.random.uniform(-4, 1, layer.dt_bias.shape)
    return layer.eval()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_good_kernels_pass(layer, dtype, bound):
    layer.lower_bound = bound
    verdicts = list(doctor.check(layer, dtype, "emulator-fast"))
    assert [v.kernel for v in verdicts] == [
        "kda_decode",
        "kda_decode",
        "kda_recurrent",
        "kda_chunk",
    ]
    assert all(v.ok and v.error > 0 for v in verdicts)
    assert layer.runner == "ops"


def _by_kernels(monkeypatch, replacement):
    """``replacement(call, right, *args)`` in the place of every call by kernels."""
    for kind in (mix.DecodeKernel, mix.PrefillKernels):
        right = kind.__call__
        monkeypatch.setattr(kind, "__call__", partialmethod(replacement, right))


def _spoil(monkeypatch, change):
    """Change what the kernels return."""
    _by_kernels(monkeypatch, lambda call, right, *args: change(*right(call, *args)))


@pytest.mark.parametrize(
    "change",
    [
        lambda y, m: (mx.zeros_like(y), m),
        lambda y, m: (y * 1.001, m),
        lambda y, m: (y, m._replace(state=m.state.swapaxes(-1, -2))),
        lambda y, m: (y, m._replace(k=mx.zeros_like(m.k))),
        lambda y, m: (y + mx.nan, m),
    ],
    ids=["dropped launch", "slightly off", "state transposed", "window", "nan"],
)
def test_a_wrong_kernel_is_seen(layer, monkeypatch, change):
    _spoil(monkeypatch, change)
    for verdict in doctor.check(layer, mx.float32, "emulator-fast"):
        assert not verdict.ok and "differs" in doctor.describe(verdict)


def test_a_kernel_that_does_not_compile_is_a_verdict(layer, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("[metal::Device] Unable to build\nmetal library")

    _by_kernels(monkeypatch, fail)
    verdict = next(doctor.check(layer, mx.float32, "emulator-fast"))
    assert not verdict.ok
    assert doctor.describe(verdict) == (
        "kda_decode on 1 token did not run: RuntimeError: [metal::Device] Unable to build "
        "metal library"
    )


@pytest.fixture
def on_metal(monkeypatch):
    """A model that would run on Metal, whose kernels the emulator runs."""
    model = tiny_model()
    model.use_runner("metal", "a test")
    _by_kernels(
        monkeypatch,
        lambda call, right, *args: right(replace(call, runner="emulator-fast"), *args),
    )
    router = moe.moe_route
    monkeypatch.setattr(
        moe, "moe_route", lambda *a, **k: router(*a, **{**k, "runner": "emulator-fast"})
    )
    return model


def test_first_use_checks_once_and_remembers(on_metal, own_cache, monkeypatch, capsys):
    verdicts = doctor.prepare(on_metal, mx.float32)
    assert len(verdicts) == 5 and all(v.ok for v in verdicts)
    assert "once on this machine" in capsys.readouterr().err
    assert on_metal.runner == "metal"
    monkeypatch.setattr(doctor, "check_model", lambda *_: pytest.fail("checked again"))
    compiled = []
    monkeypatch.setattr(doctor, "warm_up", lambda layers, *_, **__: compiled.append(len(layers)))
    assert doctor.prepare(on_metal, mx.float32) == verdicts
    assert compiled == [3]
    assert [p.name for p in own_cache.iterdir()] == ["checks.json"]


@pytest.mark.parametrize("what", ["chip", "system", "mlx", "mlx-kda"])
def test_another_machine_or_version_checks_again(on_metal, monkeypatch, what):
    doctor.prepare(on_metal, mx.float32)
    other = {**doctor.machine(), what: "another"}
    monkeypatch.setattr(doctor, "machine", lambda: other)
    asked = []
    monkeypatch.setattr(doctor, "check_model", lambda *a: asked.append(a) or iter([]))
    doctor.prepare(on_metal, mx.float32)
    assert asked


def test_a_failure_goes_over_to_the_operations_loudly(on_metal, monkeypatch, capsys):
    _spoil(monkeypatch, lambda y, m: (mx.zeros_like(y), m))
    for _ in range(2):  # found, then remembered
        on_metal.use_runner("metal", "a test")
        doctor.prepare(on_metal, mx.float32)
        said = capsys.readouterr().err.splitlines()[-1]
        assert "switched off" in said and "kda_decode on 1 token differs" in said
        assert on_metal.runner == "ops" and "self-check failed" in on_metal.runner_reason
        assert all(layer.runner == "ops" for layer in on_metal.kda_layers)


def test_a_checked_kernel_that_no_longer_compiles_is_not_used(on_metal, monkeypatch, capsys):
    doctor.prepare(on_metal, mx.float32)

    def fail(*_, **__):
        raise RuntimeError("no such library")

    monkeypatch.setattr(doctor, "warm_up", fail)
    doctor.prepare(on_metal, mx.float32)
    assert on_metal.runner == "ops"
    assert "did not compile: RuntimeError: no such library" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}'])
def test_a_spoilt_memory_is_forgotten(on_metal, own_cache, text):
    (own_cache / "checks.json").write_text(text)
    assert len(doctor.prepare(on_metal, mx.float32)) == 5


def test_nothing_is_checked_without_metal():
    assert doctor.prepare(tiny_model(), mx.float32) == []


def test_the_command(capsys):
    assert main(["doctor"]) == 0
    assert "no kernels to check" in capsys.readouterr().out
    assert main(["doctor", "--runner", "emulator-fast", "--heads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["runner"] == "emulator-fast" and len(report["checks"]) == 5
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--runner", "abacus"])
    assert "'abacus' (choose from 'auto', 'metal'" in capsys.readouterr().err


def test_the_command_checks_the_kernels_of_a_folder(tiny_mlx, capsys):
    assert main(["doctor", str(tiny_mlx), "--runner", "emulator-fast", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert checks and all(check["ok"] for check in checks)
    assert any(check["kernel"].startswith("kda_") for check in checks)


def test_the_command_fails_on_a_wrong_kernel(monkeypatch, capsys):
    _spoil(monkeypatch, lambda y, m: (mx.zeros_like(y), m))
    assert main(["doctor", "--runner", "emulator-fast", "--heads", "1"]) == 1
    assert "BAD kda_decode on 1 token differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        lambda c, w: (mx.zeros_like(c), w),
        lambda c, w: (c, w * 1.001),
        lambda c, w: (c, w + mx.nan),
    ],
    ids=["dropped launch", "weights", "nan"],
)
def test_a_wrong_router_is_seen(monkeypatch, change):
    block = moe.MoE(16, 8, 64, top_k=4, scale=2.0).eval()
    assert doctor.check_router(block, "emulator-fast").ok
    right = moe.moe_route
    monkeypatch.setattr(moe, "moe_route", lambda *a, **k: change(*right(*a, **k)))
    verdict = doctor.check_router(block, "emulator-fast")
    assert not verdict.ok and "moe_route on 16 tokens differs" in doctor.describe(verdict)
    assert block.runner == "ops"


def test_sizes_without_a_kernel_are_no_fault():
    layer = KimiDeltaAttention(16, 1, 24, conv_kernel=4, norm_eps=1e-5).eval()
    verdicts = list(doctor.check(layer, mx.float32, "emulator-fast"))
    assert all(v.ok and v.kernel == doctor.NONE for v in verdicts)
    assert "operations run: Dk = 24 is not a multiple of 32" in doctor.describe(verdicts[0])


@pytest.mark.parametrize("argv", [["nowhere"], ["--runner", "metal"], ["--runner", "cuda"]])
def test_a_mistake_is_one_line(argv, capsys):
    assert main(["doctor", *argv]) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("mlx-kda: ") and "\n" not in err and "UserError" not in err
