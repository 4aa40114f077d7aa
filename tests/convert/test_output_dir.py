"""Where an output goes: what may be replaced, full disks, kills, and several processes at once."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from helpers.checkpoints import files_of
from helpers.paused import LIMIT, Pause, started
from helpers.program import run

from mlx_kda.convert import conversion, convert, output_dir, verify
from mlx_kda.errors import UserError
from mlx_kda.weights import safetensors_writer

INDEX = "model.safetensors.index.json"
SHARDS = {"shard_bytes": 100_000}


@pytest.fixture
def out(tmp_path):
    """The output: it and what is made for it are alone in a folder."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "out"


@pytest.fixture
def partial(out):
    """Where the output is built."""
    return out.with_name("out.partial")


@pytest.fixture
def refuses():
    """A conversion fails in one line with all the words, and leaves everything as it was."""

    def check(source, out, *words, **options) -> None:
        place = next(p for p in (Path(out), *Path(out).parents) if p.is_dir())
        before = files_of(place)
        with pytest.raises(UserError) as caught:
            convert(source, out, **options)
        assert all(word in str(caught.value) for word in words), caught.value
        assert "\n" not in str(caught.value)
        assert files_of(place) == before

    return check


def dtype(folder) -> str:
    return json.loads((folder / "config.json").read_text())["torch_dtype"]


def whole_and_alone(out) -> bool:
    """Nothing beside it or in it but the output, and every file is what the report says."""
    hidden = [path.name for path in out.iterdir() if path.name.startswith(".")]
    return verify(out).ok and not hidden and [path.name for path in out.parent.iterdir()] == ["out"]


@contextlib.contextmanager
def failing_at_the_end():
    """Conversions fail when all weights are written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "_finish_folder", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            yield


# --- what may be there already


def test_an_output_in_or_around_the_source_is_refused(source, tmp_path, refuses):
    link = tmp_path / "link"
    link.symlink_to(source)
    for out in (source, source / "mlx", source / ".." / source.name / "x" / "y", source.parent):
        refuses(source, out, "source folder", overwrite=True)
    refuses(source, link, "source folder", overwrite=True)
    refuses(link, source, "source folder")
    refuses(source, link / "x", "source folder")


def test_an_output_that_is_a_file_is_refused(source, tmp_path, refuses):
    (tmp_path / "file").write_text("x")
    refuses(source, tmp_path / "file", "is a file")
    refuses(source, tmp_path / "file" / "out", "file")


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_an_output_without_a_name_is_refused(source, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="has no name of its own"):
        convert(source, name)
    assert not list(tmp_path.iterdir())


def test_an_output_is_replaced_only_if_asked_and_only_if_ours(source, out, refuses):
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    refuses(source, out, "not empty", "--overwrite")
    refuses(source, out, "not written by mlx-kda", overwrite=True)
    (out / "thesis.txt").rename(out / "conversion.json")
    refuses(source, out, "not written by mlx-kda", overwrite=True)
    (out / "conversion.json").unlink()
    convert(source, out)  # an empty folder is taken
    refuses(source, out, "not empty")
    assert convert(source, out, overwrite=True, dtype="float16").dtype == dtype(out) == "float16"
    assert whole_and_alone(out)


@pytest.mark.parametrize("kind", ["empty", "dangling", "older"])
def test_an_output_that_is_a_link_is_its_target(source, tmp_path, kind):
    place, link = tmp_path / "disk" / "place", tmp_path / "here" / "link"
    place.parent.mkdir()
    link.parent.mkdir()
    if kind == "empty":
        place.mkdir()
    if kind == "older":
        convert(source, place, dtype="float16")
    link.symlink_to(place)
    convert(source, link, dtype="bfloat16", overwrite=kind == "older")
    assert link.is_symlink() and dtype(place) == "bfloat16" and verify(link).ok
    assert [path.name for path in place.parent.iterdir()] == ["place"]
    assert [path.name for path in link.parent.iterdir()] == ["link"]


@pytest.mark.parametrize("kind", ["empty", "foreign", "file"])
def test_what_stands_where_the_output_is_built(source, out, partial, refuses, kind):
    """An empty folder may be another process's; anything without a lock is left alone."""
    if kind == "file":
        partial.write_text("mine")
    else:
        partial.mkdir()
    if kind == "foreign":
        (partial / "mine").write_text("mine")
    if kind == "empty":
        convert(source, out)
        assert whole_and_alone(out)
    else:
        refuses(source, out, "out.partial", "is something else", overwrite=True)


def test_what_a_killed_conversion_left_is_cleared(source, out, partial):
    partial.mkdir()
    (partial / ".lock").touch()
    (partial / "model-00001-of-00009.safetensors").write_bytes(b"half")
    convert(source, out)
    assert whole_and_alone(out)


def test_a_failed_overwrite_leaves_the_old_output(source, out, monkeypatch):
    convert(source, out)
    before = files_of(out)
    monkeypatch.setattr(conversion, "_write_weights", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(source, out, overwrite=True)
    assert files_of(out) == before and whole_and_alone(out)


def test_while_it_is_written_nothing_looks_finished(source, out, partial):
    """Until the end there is no folder of the final name and no config.json in the other one."""
    seen = []

    def look(done, total, name):
        seen.append(done)
        assert not out.exists()
        assert not {"config.json", INDEX} & {path.name for path in partial.iterdir()}

    report = convert(source, out, progress=look, **SHARDS)
    assert seen == sorted(seen) and seen[-1] == report.bytes_out
    assert whole_and_alone(out)


# --- disks


def failing_write(monkeypatch, after: int, error: BaseException) -> None:
    """Make the writing of weights fail after so many tensors."""
    real, count = safetensors_writer.array_bytes, 0

    def fail(array):
        nonlocal count
        count += 1
        if count > after:
            raise error
        return real(array)

    monkeypatch.setattr(safetensors_writer, "array_bytes", fail)


@pytest.mark.parametrize("after", [0, 5, 60])
@pytest.mark.parametrize(
    ("error", "word"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "disk is full"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), f"written: {os.strerror(errno.EIO)}"),
        (KeyboardInterrupt(), ""),
    ],
    ids=["full", "fault", "ctrl-c"],
)
def test_a_failure_keeps_what_is_finished(source, out, partial, monkeypatch, error, word, after):
    """Nothing has the final name, the source is as it was, and the log tells of the rest."""
    failing_write(monkeypatch, after, error)
    before, said = files_of(source), []
    with pytest.raises((UserError, KeyboardInterrupt)) as caught:
        convert(source, out, log=said.append, **SHARDS)
    assert word in str(caught.value) and "\n" not in str(caught.value)
    assert files_of(source) == before and not out.exists()
    left = {path.name for path in partial.glob("*")}
    done = [name for name in left if name.endswith(".done.json")]
    assert not [name for name in left if name.endswith(".tmp") or name == "config.json"]
    assert len([name for name in left if name.startswith("model-")]) == len(done)
    assert partial.exists() == bool(done) == (after > 0)
    assert ["--resume" in line for line in said] == [True] * bool(done)


def test_a_disk_that_is_too_small_is_refused_beforehand(source, out, monkeypatch, refuses):
    class Usage:
        free = 1000

    monkeypatch.setattr("mlx_kda.convert.output_dir.shutil.disk_usage", lambda path: Usage)
    failing_write(monkeypatch, 0, AssertionError("nothing may be written"))
    refuses(source, out, "needs", "1 KB free")


def test_a_folder_that_cannot_be_written(source, out, monkeypatch, refuses):
    real = Path.mkdir

    def mkdir(self, *args, **kwargs):
        if self.name.endswith(".partial"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    refuses(source, out, "cannot be written", os.strerror(errno.EACCES))


def test_a_file_system_without_locks(source, out, monkeypatch):
    """Some network disks have none: a conversion there works without."""

    def flock(file, how):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    convert(source, out)
    assert whole_and_alone(out)


# --- signals and kills


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("finished", [0, 2])
def test_a_signal_keeps_what_is_finished_and_nothing_else(
    source, tmp_path, out, partial, number, finished
):
    """Without a finished file the folder goes; with some they stay, and a message says so."""
    pause = Pause(f"writing:{finished}", tmp_path / "pause")
    command = [*pause.program, "convert", source, out, "--shard-size", "100000"]
    with started(command) as process:
        pause.reached(process)
        assert len(list(partial.glob("*.done.json"))) == finished and partial.is_dir()
        process.send_signal(number)
        said = process.communicate()[1].decode()
    assert process.returncode == 128 + number and not out.exists()
    assert ("--resume" in said) == bool(finished)
    left = {path.name for path in partial.iterdir()} if partial.exists() else set()
    assert bool(left) == bool(finished) and not [name for name in left if name.endswith(".tmp")]


@pytest.mark.parametrize("then", ["resume", "overwrite", "neither"])
def test_a_kill_between_the_renames_loses_neither_output(source, tmp_path, out, then):
    """Two renames put a new output in an older one's place."""
    convert(source, out, dtype="float16")
    pause = Pause("calling:os.rename:2", tmp_path / "pause")
    with started(
        [*pause.program, "convert", source, out, "--dtype", "bfloat16", "--overwrite"]
    ) as process:
        pause.reached(process)
        process.kill()
    assert not out.exists()
    if then == "neither":
        with pytest.raises(UserError, match="not empty"):
            convert(source, out, dtype="bfloat16")
        assert dtype(out) == "float16" and verify(out).ok
    convert(source, out, dtype="bfloat16", resume=then != "overwrite", overwrite=True)
    assert dtype(out) == "bfloat16" and whole_and_alone(out)


def test_an_older_output_whose_place_was_taken_is_not_thrown_away(source, out, partial):
    """Killed while it replaced an output, which nobody has asked to overwrite since."""
    convert(source, out)
    partial.mkdir()
    (partial / output_dir.LOCK).touch()
    out.rename(partial / output_dir.OLD)
    out.mkdir()
    (out / "mine").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        convert(source, out)
    assert (out / "mine").exists() and verify(partial / output_dir.OLD).ok


# --- other processes at the same moment


def ended(process: subprocess.Popen) -> tuple[int, str]:
    """Exit status and standard error."""
    said = process.communicate(timeout=LIMIT)[1].decode()
    assert "Traceback" not in said
    return process.returncode, said


def test_a_second_conversion_into_the_same_folder_is_refused(source, out):
    tried = []

    def meanwhile(done, total, name):
        if not tried:
            tried.append(name)
            with pytest.raises(UserError, match="another conversion"):
                convert(source, out)

    convert(source, out, progress=meanwhile)
    assert tried and whole_and_alone(out)


def test_two_that_tidy_the_same_output(source, tmp_path, out):
    """One is about to remove what it found in its finished output, when another removes that."""
    convert(source, out)
    options = ["--dtype", "float16", "--overwrite"]
    pause = Pause("calling:shutil.rmtree:1", tmp_path / "pause")
    with started([*pause.program, "convert", source, out, *options]) as first:
        pause.reached(first)
        report = convert(source, out, dtype="float16", overwrite=True, resume=True)
        assert report.dtype == "float16" and not (out / ".old").exists()
        pause.end()
        assert ended(first) == (0, "")
    assert whole_and_alone(out)


@pytest.mark.parametrize("begun", [False, True])
def test_three_that_begin_at_once(source, tmp_path, out, partial, begun):
    """All have seen that there is no output yet, and go for the lock together."""
    if begun:
        with failing_at_the_end():
            convert(source, out, **SHARDS)
        assert (partial / ".resume.json").exists()
    options = ["--shard-size", "100000", "--resume"]
    place = "calling:mlx_kda.convert.conversion.locked:1"
    pauses = [Pause(place, tmp_path / f"pause{number}") for number in range(3)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started([*pause.program, "convert", source, out, *options]))
            for pause in pauses
        ]
        for pause, process in zip(pauses, processes, strict=True):
            pause.reached(process)
        for pause in pauses:
            pause.end()
        ends = [ended(process) for process in processes]
    for status, said in ends:
        if status == 2:
            assert said.count("\n") == 1 and "another conversion is writing" in said
        else:
            assert status == 0
            assert "complete already" in said or ("resuming" if begun else "no unfinished") in said
    assert len([said for status, said in ends if not status and "complete" not in said]) == 1
    assert whole_and_alone(out)


def test_the_other_finishes_between_the_folder_and_its_lock(source, out, monkeypatch):
    real, said = output_dir.try_lock, []

    def lock_later(path, remove):
        monkeypatch.setattr(output_dir, "try_lock", real)
        path.parent.rmdir()
        convert(source, out)
        return real(path, remove)

    monkeypatch.setattr(output_dir, "try_lock", lock_later)
    report = convert(source, out, resume=True, log=said.append)
    assert report.tensors_out and "complete already" in said[-1]
    assert whole_and_alone(out)


def test_an_output_that_appears_before_the_lock_is_not_replaced(source, out, monkeypatch):
    """Another process finishes between the look at the output and the lock."""
    real = conversion.read_aux_files

    def meanwhile(origin):
        monkeypatch.setattr(conversion, "read_aux_files", real)
        convert(source, out, dtype="float16")
        return real(origin)

    monkeypatch.setattr(conversion, "read_aux_files", meanwhile)
    with pytest.raises(UserError, match="not empty"):
        convert(source, out, dtype="bfloat16")
    assert dtype(out) == "float16" and whole_and_alone(out)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_appears_during_a_conversion_is_not_replaced(
    source, out, monkeypatch, overwrite
):
    """Somebody's own files in the output's place at the end of the work are kept."""
    real, said = conversion._finish_folder, []

    def meanwhile(*args):
        out.mkdir()
        (out / "mine").write_text("mine")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_finish_folder", meanwhile)
        with pytest.raises(UserError, match="not empty|not written by mlx-kda"):
            convert(source, out, overwrite=overwrite, log=said.append)
    assert (out / "mine").read_text() == "mine" and "--resume" in said[-1]
    (out / "mine").unlink()
    convert(source, out, resume=True)
    assert whole_and_alone(out)


def test_a_record_that_lacks_a_fact_is_no_finished_file(source, out, partial):
    with failing_at_the_end():
        convert(source, out, **SHARDS)
    records = sorted(partial.glob(".*.done.json"))
    for record, fact in zip(records, ("bytes", "sha256", "holds"), strict=False):
        facts = json.loads(record.read_text())
        del facts[fact]
        record.write_text(json.dumps(facts))
    said = []
    convert(source, out, resume=True, log=said.append, **SHARDS)
    assert sum("is damaged" in line for line in said) == 3
    assert whole_and_alone(out)


def test_a_repository_to_upload_to_is_checked_before_the_work(source, out):
    done = run("convert", str(source), str(out), "--upload-repo", "x")
    assert done.returncode == 2 and "owner/name" in done.stderr
    assert not list(out.parent.iterdir())
