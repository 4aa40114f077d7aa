"""Conversions to one output at the same moment: one writes it whole, the others say one line."""

import errno
import fcntl
import json
import subprocess
import sys
import time

import pytest
from helpers.tiny_checkpoint import write_checkpoint

from mlx_kda.convert import conversion, convert, output_dir, verify
from mlx_kda.errors import UserError

# The program, which waits before its `count`-th call of a function: argv is MODULE FUNCTION COUNT
# FOLDER and then its own. It makes FOLDER/here.PID and goes on once there is FOLDER/go.
WAITING = """
import importlib, os, pathlib, sys, time
module, name, count, folder = sys.argv[1:5]
owner, meet = importlib.import_module(module), pathlib.Path(folder)
real, calls = getattr(owner, name), []
def waiting(*args, **kwargs):
    calls.append(1)
    if len(calls) == int(count):
        (meet / f"here.{os.getpid()}").touch()
        while not (meet / "go").exists():
            time.sleep(0.005)
    return real(*args, **kwargs)
setattr(owner, name, waiting)
from mlx_kda.cli.main import main
sys.exit(main(sys.argv[5:]))
"""
LIMIT = 200  # seconds


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("together") / "source")


@pytest.fixture
def meet(tmp_path):
    (tmp_path / "meet").mkdir()
    return tmp_path / "meet"


def waiting(module, name, count, meet, *argv):
    """The program on its way to the place where it waits."""
    words = [sys.executable, "-c", WAITING, module, name, count, meet, "convert", *argv]
    return subprocess.Popen(
        list(map(str, words)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def arrived(meet, *processes):
    """Return once all of them wait."""
    until = time.monotonic() + LIMIT
    while len(list(meet.glob("here.*"))) < len(processes):
        assert all(process.poll() is None for process in processes), "ended before it waited"
        assert time.monotonic() < until
        time.sleep(0.01)


def ended(process):
    """(exit status, what it said)"""
    said = process.communicate(timeout=LIMIT)[1]
    assert "Traceback" not in said
    return process.returncode, said


def is_whole_and_alone(out):
    """Nothing beside it or in it but the output, and every file is what the report says."""
    assert verify(out).ok
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
    assert {path.name for path in out.parent.iterdir()} <= {out.name, "meet", "source"}


def test_two_that_tidy_the_same_output(source, tmp_path, meet):
    """One is about to remove what it found in its finished output, when another removes that.

    The first used to end with "cannot be written: No such file or directory" and status 2.
    """
    out = tmp_path / "out"
    convert(source, out)
    wish = [source, out, "--dtype", "float16", "--overwrite"]
    first = waiting("shutil", "rmtree", 1, meet, *wish)
    arrived(meet, first)
    report = convert(source, out, dtype="float16", overwrite=True, resume=True)
    assert report.dtype == "float16" and not (out / ".old").exists()
    (meet / "go").touch()
    assert ended(first) == (0, "")
    is_whole_and_alone(out)


@pytest.mark.parametrize("begun", [False, True])
def test_three_that_begin_at_once(source, tmp_path, meet, monkeypatch, begun):
    """All have seen that there is no output yet, and go for the lock together."""
    out = tmp_path / "out"
    wish = {"shard_bytes": 100_000}
    if begun:
        with monkeypatch.context() as patch:
            patch.setattr(conversion, "_finish_folder", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                convert(source, out, **wish)
        assert (tmp_path / "out.partial" / ".resume.json").exists()
    argv = [source, out, "--shard-size", "100000", "--resume"]
    processes = [waiting("mlx_kda.convert.conversion", "locked", 1, meet, *argv) for _ in range(3)]
    arrived(meet, *processes)
    (meet / "go").touch()
    ends = [ended(process) for process in processes]
    for status, said in ends:
        lines = said.splitlines()
        if status == 2:
            assert len(lines) == 1 and "another conversion is writing" in lines[0]
        else:
            assert status == 0
            assert "complete already" in said or ("resuming" if begun else "no unfinished") in said
    wrote = [said for status, said in ends if status == 0 and "complete already" not in said]
    assert len(wrote) == 1
    is_whole_and_alone(out)


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_other_finishes_between_the_folder_and_its_lock(
    source, tmp_path, monkeypatch, overwrite
):
    """A second --resume used to be told to look at the output, or that it was in the way."""
    out, real, said = tmp_path / "out", output_dir.try_lock, []

    def lock_later(path, remove):
        monkeypatch.setattr(output_dir, "try_lock", real)
        path.parent.rmdir()
        convert(source, out)
        return real(path, remove)

    monkeypatch.setattr(output_dir, "try_lock", lock_later)
    report = convert(source, out, resume=True, overwrite=overwrite, log=said.append)
    assert report.tensors_out and "complete already" in said[-1]
    is_whole_and_alone(out)


@pytest.mark.parametrize("kind", ["empty", "foreign", "file"])
def test_what_stands_where_the_output_is_built(source, tmp_path, kind):
    """An empty folder is one that another process is about to lock; anything else is left alone."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    if kind == "file":
        partial.write_text("mine")
    else:
        partial.mkdir()
    if kind == "foreign":
        (partial / "mine").write_text("mine")
    if kind == "empty":
        convert(source, out)
        return is_whole_and_alone(out)
    with pytest.raises(UserError, match="is something else"):
        convert(source, out, overwrite=True)
    assert (partial / "mine" if kind == "foreign" else partial).read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_appears_during_a_conversion_is_not_replaced(
    source, tmp_path, monkeypatch, overwrite
):
    """Somebody's own files in the output's place at the end of the work used to be deleted."""
    out, real = tmp_path / "out", conversion._finish_folder

    def meanwhile(*args):
        out.mkdir()
        (out / "mine").write_text("mine")
        return real(*args)

    monkeypatch.setattr(conversion, "_finish_folder", meanwhile)
    said = []
    with pytest.raises(UserError, match="not empty|not written by mlx-kda"):
        convert(source, out, overwrite=overwrite, log=said.append)
    assert (out / "mine").read_text() == "mine" and "--resume" in said[-1]
    (out / "mine").unlink()
    monkeypatch.setattr(conversion, "_finish_folder", real)
    convert(source, out, resume=True)
    is_whole_and_alone(out)


def test_an_older_output_whose_place_was_taken_is_not_thrown_away(source, tmp_path):
    """Killed while it replaced an output, which nobody has asked to overwrite since."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    convert(source, out)
    partial.mkdir()
    (partial / output_dir.LOCK).touch()
    out.rename(partial / output_dir.OLD)
    out.mkdir()
    (out / "mine").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        convert(source, out)
    assert (out / "mine").exists() and verify(partial / output_dir.OLD).ok


def test_a_record_that_lacks_a_fact_is_no_finished_file(source, tmp_path, monkeypatch):
    """It used to end the conversion with a KeyError."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_finish_folder", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, out, shard_bytes=100_000)
    for record, fact in zip(
        sorted(partial.glob(".*.done.json")), ("bytes", "sha256", "holds"), strict=False
    ):
        facts = json.loads(record.read_text())
        del facts[fact]
        record.write_text(json.dumps(facts))
    said = []
    convert(source, out, shard_bytes=100_000, resume=True, log=said.append)
    assert sum("is damaged" in line for line in said) == 3
    is_whole_and_alone(out)


def test_a_file_system_without_locks(source, tmp_path, monkeypatch):
    """Some network disks have none: a conversion there goes on without."""

    def flock(file, how):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    convert(source, tmp_path / "out")
    is_whole_and_alone(tmp_path / "out")
