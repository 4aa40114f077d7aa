"""The program: help, exit statuses, and one line for every failure."""

import argparse
import os
import re
import signal
import subprocess
import sys

import mlx.core as mx
import pytest
from helpers.paused import Pause, started
from helpers.program import PROGRAM, run

from mlx_kda.cli import main as program
from mlx_kda.cli.main import COMMANDS
from mlx_kda.cli.reports import kda_paths
from mlx_kda.cli.signals import WAITING
from mlx_kda.errors import UserError


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        program.main([command, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "example:\n  mlx-kda" in out and f"mlx-kda {command} " in out.split("example:")[1] + " "


def parsers(parser=None):
    """Every parser of the program."""
    parser = program.build_parser() if parser is None else parser
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from parsers(one)


def test_every_option_says_what_it_is():
    """And the same things in the same words: what a MODEL is, how a default is told."""
    for parser in parsers():
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            where = f"{parser.prog} {action.dest}"
            assert action.help, where
            if action.dest in ("model", "source") and "folder" in action.help:
                assert re.search("checkpoint|model|converted", action.help), where
            if action.default not in (None, False, []) and action.nargs != 0:
                assert "default" in action.help, where
            if "default" in action.help:  # told in one way
                assert re.search(r"\(default: [^()]*\)", action.help), where
            assert not action.help.startswith("default"), where  # what it is, too
            assert not re.search(r"\bKb|\bkB|\bGiB|\bMiB|tok/s|tokens a second", action.help), where


def test_help_lists_every_command_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom mlx_kda.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'rich', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for command in COMMANDS:
        assert f"\n    {command} " in result.stdout


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


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["frobnicate"],
        ["convert", "only-a-source"],
        ["convert", "a", "b", "--q-bits", "7"],
        ["convert", "a", "b", "--dtype", "int8"],
        ["convert", "a", "b", "--q-bit", "4"],  # no abbreviations
        ["generate", "m", "--temp", "-1", "--prompt", "x"],
        ["generate", "m", "--temp", "nan", "--prompt", "x"],
        ["generate", "m", "--top-p", "1.5", "--prompt", "x"],
        ["generate", "m", "--max-tokens", "-3", "--prompt", "x"],
        ["generate", "m", "--max-tokens", "many", "--prompt", "x"],
        ["generate", "m", "--prompt", "x", "--prompt-file", "y"],
        ["chat", "m", "another"],
        ["info"],
    ],
)
def test_bad_flags_are_one_line_and_status_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        program.main(argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("mlx-kda") and err.count("\n") == 1 and "--help" in err


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
    assert err == "mlx-kda: TypeError: odd thing (mlx-kda --debug ... shows where)\n"


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


def test_a_failure_of_the_program_has_no_traceback(tmp_path):
    result = run("info", str(tmp_path / "nowhere"))
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("mlx-kda: ") and result.stderr.count("\n") == 1


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
