"""SIGTERM and Ctrl-C while a folder is being made: nothing half done stays behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.tiny_checkpoint import write_checkpoint

PROGRAM = [sys.executable, "-m", "mlx_kda.cli.main"]
BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("signals") / "source")


def ended(command, number, begun, seconds=60.0, **options):
    """Run a command, send it a signal once `begun()`, and wait; (exit status, what it said)."""
    process = subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, **options
    )
    until = time.monotonic() + seconds
    while not begun() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert process.poll() is None, "it had ended before the signal"
    process.send_signal(number)
    return process.wait(timeout=seconds), process.stderr.read().decode()


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
    status, said = ended(
        [*PROGRAM, "bench", kind, source, *more],
        number,
        lambda: any(scratch.glob("*/*")),
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    assert status == 128 + number
    assert "Traceback" not in said
    time.sleep(0.2)  # a conversion that went on would write there again
    assert list(scratch.iterdir()) == []


# A conversion that waits before each file, so that the signal finds it at work.
SLOW = (
    "import sys, time; from mlx_kda.convert import shards; from mlx_kda.cli.main import main; "
    "real = shards.write_file; "
    "shards.write_file = lambda *a, **k: (time.sleep({}), real(*a, **k))[1]; "
    "sys.exit(main(sys.argv[1:]))"
)


@BOTH
@pytest.mark.parametrize("finished", [0, 2])
def test_a_conversion_keeps_what_is_finished_and_nothing_else(source, tmp_path, number, finished):
    """Without a finished file the folder goes; with some they stay, and the line says so."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    pause = 0.5 if finished else 60
    status, said = ended(
        [
            *(sys.executable, "-c", SLOW.format(pause), "convert", source, out),
            *("--shard-size", "100000"),
        ],
        number,
        lambda: len(list(partial.glob("*.done.json"))) >= finished and partial.is_dir(),
    )
    assert status == 128 + number and not out.exists()
    assert ("--resume" in said) == bool(finished)
    left = {path.name for path in partial.iterdir()} if partial.exists() else set()
    assert bool(left) == bool(finished) and not [name for name in left if name.endswith(".tmp")]
