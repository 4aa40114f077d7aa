"""The program: help, exit statuses, and one line for every failure."""

import os
import signal
import subprocess
import sys

import mlx.core as mx
import pytest
from helpers.paused import Pause, started
from helpers.program import PROGRAM

from mlx_kda.cli import main as program
from mlx_kda.cli.reports import kda_paths
from mlx_kda.cli.signals import WAITING
from mlx_kda.errors import UserError


def test_help_is_quick():
    """Under 0.3 s of processor time: a clock would measure the rest of the machine too."""
    best = float("inf")
    for _ in range(5):
        before = os.times()
        subprocess.run([*PROGRAM, "--help"], check=True, capture_output=True)
        after = os.times()
        used = after.children_user + after.children_system
        best = min(best, used - before.children_user - before.children_system)
    assert best < 0.3


HINT = "(run mlx-kda --debug ... for the traceback)"


@pytest.mark.parametrize(
    ("argv", "error", "status", "told"),
    [
        ([], UserError("shard 3:\n  download it again"), 2, "shard 3: download it again"),
        ([], TypeError("odd\nthing"), 1, f"TypeError: odd thing {HINT}"),
        (["--debug"], TypeError("odd"), 1, "TypeError: odd"),
        ([], KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["a user's mistake", "the unexpected", "the unexpected with --debug", "an interrupt"],
)
def test_a_failure_is_one_line_and_a_status(monkeypatch, capsys, argv, error, status, told):
    """Only ``--debug`` puts the traceback before it."""

    def run(args):
        raise error

    monkeypatch.setattr("mlx_kda.cli.info.run", run)
    assert program.main([*argv, "info", "x"]) == status
    out, err = capsys.readouterr()
    traceback, line = err.rsplit("mlx-kda: ", 1) if argv else ("", err.removeprefix("mlx-kda: "))
    assert out == "" and line == told + "\n" and traceback.startswith("Traceback" if argv else "")


ANSWER = ["--prompt", "x", "--raw", "--ignore-eos", "--max-tokens", "400"]


def test_interrupted_program(tiny_mlx, tmp_path):
    """SIGINT to the real program in the middle of an answer: what it said, one line, 130."""
    pause = Pause("answering:3", tmp_path / "pause")
    with started([*pause.program, "generate", tiny_mlx, *ANSWER]) as process:
        pause.reached(process)
        process.send_signal(signal.SIGINT)
        pause.end()
        out, err = process.communicate()
    assert process.returncode == 130 and out
    told = err.decode().replace(WAITING + "\n", "")  # a busy machine takes its time for a step
    assert told == "mlx-kda: interrupted\n"


def test_a_closed_pipe_is_quiet(tiny_mlx, tmp_path):
    pause = Pause("answering:3", tmp_path / "pause")
    with started([*pause.program, "generate", tiny_mlx, *ANSWER]) as process:
        pause.reached(process)
        process.stdout.close()
        pause.end()
        err = process.stderr.read()
        assert process.wait() == 141 and err == b""


def test_text_that_the_terminal_cannot_show(tiny_mlx):
    """An ASCII terminal gets a replacement, not a UnicodeEncodeError."""
    result = subprocess.run(
        [*PROGRAM, "generate", str(tiny_mlx), "--prompt", "\u6f22", "--max-tokens", "30"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()


def test_info_names_a_models_kernels_on_a_mac(tiny_model, monkeypatch):
    """What its layers launch, not what the op by itself would."""
    model, _ = tiny_model
    assert set(kda_paths(model.args, "float32")) == {"prefill", "decode"}
    assert not any("kda_" in path for path in kda_paths(model.args, "float32").values())
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    paths = kda_paths(model.args, "float32")
    assert paths["prefill"].startswith("kda_chunk: ")
    assert paths["decode"].startswith("kda_decode: ")


@pytest.mark.parametrize("given, kept", [(None, "0"), ("1", "1")])
def test_float32_products_are_float32_unless_the_user_wants_less(given, kept):
    """From the M5 on MLX rounds them to TF32; it reads the environment when it starts."""
    code = (
        "import os, sys\n"
        "from mlx_kda.cli.main import main\n"
        "early = 'mlx.core' in sys.modules\n"
        "main(['info', 'nowhere'])\n"
        "print(early, os.environ['MLX_ENABLE_TF32'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "MLX_ENABLE_TF32"}
    if given is not None:
        environment["MLX_ENABLE_TF32"] = given
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", kept]
