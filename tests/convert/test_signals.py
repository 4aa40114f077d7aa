"""SIGTERM and Ctrl-C during a benchmark that makes a folder: it is removed."""

import os
import signal
import sys

import pytest
from helpers.paths import ROOT
from helpers.paused import started, wait_for
from helpers.tiny_checkpoint import write_checkpoint

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("signals") / "source")


def ended(process, number):
    """Send a process a signal, and wait; (exit status, what it said)."""
    assert process.poll() is None, "it had ended before the signal"
    process.send_signal(number)
    _, said = process.communicate()
    return process.returncode, said.decode()


def alive(group):
    """Whether some process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@BOTH
@pytest.mark.parametrize("script", ["quality", "conversion"])
def test_a_benchmark_leaves_no_folder(source, tmp_path, number, script):
    """Neither a converted model in the system's temporary folder, nor a process that writes it."""
    text, scratch = tmp_path / "text.txt", tmp_path / "scratch"
    text.write_text("Once upon a time there was a river. " * 40)
    scratch.mkdir()
    more = {
        "quality": ["--text", text, "--recipes", ",".join(["source", "q4", "q8"] * 20)],
        "conversion": ["--samples", "50"],
    }[script]
    environment = os.environ | {"TMPDIR": str(scratch)}
    command = [sys.executable, ROOT / "benchmarks" / f"{script}.py", source, *more]
    with started(command, env=environment, start_new_session=True) as process:
        wait_for(lambda: any(scratch.glob("*/*")), "its folder", process)
        status, said = ended(process, number)
    assert status == 128 + number
    assert "Traceback" not in said
    # Nobody is left that would write there again.
    wait_for(lambda: not alive(process.pid), "the end of all its processes")
    assert list(scratch.iterdir()) == []
