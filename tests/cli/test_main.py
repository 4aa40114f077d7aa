"""The program: help, exit statuses, and one line for every failure."""

import os
import signal
import subprocess

import mlx.core as mx
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


def failing(monkeypatch, error):
    """Make ``mlx-kda info x`` raise ``error``."""

    def run(args):
        raise error

    monkeypatch.setattr("mlx_kda.cli.info.run", run)


def test_a_users_mistake_is_one_line_and_status_2(monkeypatch, capsys):
    failing(monkeypatch, UserError("shard 3 is truncated:\n  download it again"))
    assert program.main(["info", "x"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == "mlx-kda: shard 3 is truncated: download it again\n"


def test_the_unexpected_is_one_line_with_a_hint(monkeypatch, capsys):
    failing(monkeypatch, TypeError("odd\nthing"))
    assert program.main(["info", "x"]) == 1
    err = capsys.readouterr().err
    assert err == "mlx-kda: TypeError: odd thing (run mlx-kda --debug ... for the traceback)\n"


def test_debug_shows_the_traceback(monkeypatch, capsys):
    failing(monkeypatch, TypeError("odd"))
    assert program.main(["--debug", "info", "x"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith("mlx-kda: TypeError: odd\n")


def test_an_interrupt_is_one_line_and_status_130(monkeypatch, capsys):
    failing(monkeypatch, KeyboardInterrupt())
    assert program.main(["info", "x"]) == 130
    assert capsys.readouterr().err == "mlx-kda: interrupted\n"


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
