"""Ctrl-C and SIGTERM: a step is finished; a second Ctrl-C ends at once and what was saved stays."""

import os
import signal
import subprocess
import sys

import pytest
from helpers.paused import LIMIT, Pause, started, told

from mlx_kda import files
from mlx_kda.cli.chat_commands import Chat
from mlx_kda.cli.session_file import SessionFile
from mlx_kda.cli.signals import WAITING, stop_on_signals
from mlx_kda.session import Session


@pytest.fixture
def saved(tiny_model, tmp_path):
    """A session's file in a folder of its own."""
    file = tmp_path / "kept" / "s"
    file.parent.mkdir()
    session = Session(*tiny_model)
    session.prefill([1, 2, 3])
    session.save(file)
    return file


@pytest.mark.parametrize(
    ("command", "where"), [("generate", "reading"), ("generate", "saving"), ("chat", "reading")]
)
def test_a_second_ctrl_c_ends_at_once(tiny_mlx, saved, tmp_path, command, where):
    """Although the step would never end; the session of before stays, nothing is left."""
    before = saved.read_bytes()
    if command == "generate":
        argv = [command, tiny_mlx, "--prompt", "hello", "--raw"]
    else:
        argv = [command, tiny_mlx]
    pause = Pause(where, tmp_path / "pause")
    flags = ["--max-tokens", "2", "--session", saved]
    with started([*pause.program, *argv, *flags]) as process:
        process.stdin.write(b"hello\n")
        process.stdin.close()
        process.stdin = None
        pause.reached(process)
        process.send_signal(signal.SIGINT)
        told(process, WAITING)
        process.send_signal(signal.SIGINT)  # nobody lets the step go on: it ends all the same
        _, err = process.communicate()
    assert process.returncode == 130
    assert err.decode().strip() == "mlx-kda: quit without saving"
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.parametrize("place", ["import:mlx.core", "import:transformers", "loading"])
def test_ctrl_c_outside_of_steps_is_one_line_however_often(tiny_mlx, tmp_path, place):
    """While libraries are imported or weights are loaded: no traceback, whenever they come.

    A key held down used to leave one: the second signal came while the first was on its way up.
    """
    pause = Pause(place, tmp_path / "pause")
    flags = ["--prompt", "x", "--max-tokens", "400", "--raw", "--ignore-eos"]
    with started([*pause.program, "generate", tiny_mlx, *flags]) as process:
        pause.reached(process)
        for _ in range(50):
            process.send_signal(signal.SIGINT)
        line = process.stderr.readline()
        for _ in range(3):
            process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    err = line + err
    assert process.returncode in (130, -signal.SIGINT), err
    assert b"Traceback" not in err and err.count(b"\n") <= 2


def test_a_key_held_down_is_one_ctrl_c(monkeypatch):
    """What comes within a moment of the first signal belongs to it."""
    monkeypatch.setattr("mlx_kda.cli.signals.PATIENCE", LIMIT)
    with stop_on_signals() as stop:
        for _ in range(5):
            signal.raise_signal(signal.SIGINT)
        assert stop and not stop.ends


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_chat_saves_does_not_cut_it_short(tiny_model, tmp_path, sent):
    """Ctrl-C is no end of a chat; SIGTERM is one, once the file is whole."""
    session = Session(*tiny_model)
    talk = Chat(session, SessionFile(tmp_path / "s"))
    save = session.save

    def interrupted(path):
        signal.raise_signal(sent)
        save(path)

    session.save = interrupted
    session.prefill([1, 2, 3])
    talk.save_if_due()
    assert Session.load(tmp_path / "s", *tiny_model).tokens == [1, 2, 3]
    assert talk.exit_status == (None if sent == signal.SIGINT else 128 + sent)


def test_sigterm_after_ctrl_c_still_ends_the_program():
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop.ends and stop.status == 128 + signal.SIGTERM


def test_handlers_and_the_wakeup_are_as_before():
    before = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
    for _ in range(3):
        with stop_on_signals():
            pass
    assert (signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)) == before


def test_what_a_killed_process_left_is_removed(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / f".s.{gone.pid}.tmp"
    fresh = tmp_path / f".s.{gone.pid}0000000.tmp"
    mine = tmp_path / f".s.{os.getppid()}.tmp"
    other = tmp_path / f".other.{gone.pid}.tmp"
    odd = tmp_path / ".s.notes.tmp"
    for path in (left, fresh, mine, other, odd):
        path.write_text("x")
        if path is not fresh:
            os.utime(path, (1, 1))
    files.write_text(tmp_path / "s", "whole")
    assert not left.exists()
    assert all(path.exists() for path in (fresh, mine, other, odd))
    assert (tmp_path / "s").read_text() == "whole"
