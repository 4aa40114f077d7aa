"""SIGTERM and Ctrl-C while a folder is being made: nothing half done stays behind."""

import os
import signal

import pytest
from helpers.paused import Pause, started, wait_for
from helpers.program import PROGRAM
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
@pytest.mark.parametrize("kind", ["quality", "convert"])
def test_a_benchmark_leaves_no_folder(source, tmp_path, number, kind):
    """`bench quality` used to leave a converted model in the system's temporary folder."""
    text, scratch = tmp_path / "text.txt", tmp_path / "scratch"
    text.write_text("Once upon a time there was a river. " * 40)
    scratch.mkdir()
    more = {
        "quality": ["--text", text, "--recipes", ",".join(["source", "q4", "q8"] * 20)],
        "convert": ["--samples", "50"],
    }[kind]
    environment = os.environ | {"TMPDIR": str(scratch)}
    command = [*PROGRAM, "bench", kind, source, *more]
    with started(command, env=environment, start_new_session=True) as process:
        wait_for(lambda: any(scratch.glob("*/*")), "its folder", process)
        status, said = ended(process, number)
    assert status == 128 + number
    assert "Traceback" not in said
    # Nobody is left that would write there again.
    wait_for(lambda: not alive(process.pid), "the end of all its processes")
    assert list(scratch.iterdir()) == []


@BOTH
@pytest.mark.parametrize("finished", [0, 2])
def test_a_conversion_keeps_what_is_finished_and_nothing_else(source, tmp_path, number, finished):
    """Without a finished file the folder goes; with some they stay, and the line says so."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    pause = Pause(f"writing:{finished}", tmp_path / "pause")
    command = [*pause.program, "convert", source, out, "--shard-size", "100000"]
    with started(command) as process:
        pause.reached(process)
        assert len(list(partial.glob("*.done.json"))) == finished and partial.is_dir()
        status, said = ended(process, number)
    assert status == 128 + number and not out.exists()
    assert ("--resume" in said) == bool(finished)
    left = {path.name for path in partial.iterdir()} if partial.exists() else set()
    assert bool(left) == bool(finished) and not [name for name in left if name.endswith(".tmp")]
