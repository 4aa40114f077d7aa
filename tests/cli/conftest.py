"""Fixtures of the command line's tests: signals in the middle of an answer, and terminals."""

import os
import signal

import pytest
from helpers.paused import LIMIT
from helpers.program import PROGRAM

from mlx_kda.cli import output


@pytest.fixture
def signal_after(monkeypatch):
    """Sends a signal to this process when so many pieces of an answer have been printed."""

    def arrange(pieces, number):
        written = []

        def write(text):
            written.append(text)
            if len(written) == pieces:
                signal.raise_signal(number)

        monkeypatch.setattr(output, "write", write)

    return arrange


@pytest.fixture
def at_terminal():
    """Starts the program in a pseudo-terminal of 120 columns; ended after the test."""
    pexpect = pytest.importorskip("pexpect")
    started = []

    def start(*argv, program=PROGRAM, columns=120, **environment):
        child = pexpect.spawn(
            program[0],
            [*program[1:], *map(str, argv)],
            env=os.environ | {"TERM": "xterm"} | environment,
            encoding="utf-8",
            codec_errors="replace",
            timeout=LIMIT,
            dimensions=(40, columns),
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.close(force=True)


@pytest.fixture
def clock(monkeypatch):
    """The time by which saving in between is decided, in a list of one number of seconds."""
    now = [1000.0]
    monkeypatch.setattr("mlx_kda.cli.session_file.time.monotonic", lambda: now[0])
    return now
