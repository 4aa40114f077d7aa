"""Atomic writes and locks: several writers, links, files that killed processes leave."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
import time

import pytest

from mlx_kda import files


@pytest.fixture
def gone():
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_two_writers_of_one_process_have_files_of_their_own(tmp_path):
    """Both have begun before either writes."""
    both, errors = threading.Barrier(2), []

    def write(letter):
        try:
            with files.new_file(tmp_path / "s") as temporary:
                both.wait()
                with temporary.open("w") as file:
                    for _ in range(50):
                        file.write(letter * 1000)
                        file.flush()
                both.wait()
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert (tmp_path / "s").read_text() in ("a" * 50_000, "b" * 50_000)
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_stays_a_link(tmp_path, dangling):
    """Its target is written, on the disk where that is."""
    (tmp_path / "disk").mkdir()
    place = tmp_path / "disk" / "s"
    if not dangling:
        place.write_text("old")
    (tmp_path / "s").symlink_to(place)
    files.write_text(tmp_path / "s", "new")
    assert (tmp_path / "s").is_symlink() and place.read_text() == "new"
    assert os.listdir(place.parent) == ["s"]


def test_a_private_file_stays_private(tmp_path):
    path = tmp_path / "s"
    files.write_text(path, "one")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o600)
    files.write_text(path, "two")
    assert path.read_text() == "two" and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_block_that_fails_leaves_the_old_file_alone(tmp_path):
    files.write_text(tmp_path / "s", "old")
    with pytest.raises(ZeroDivisionError), files.new_file(tmp_path / "s") as temporary:
        temporary.write_text("new")
        raise ZeroDivisionError
    assert (tmp_path / "s").read_text() == "old" and os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("ago", [100, -100])
def test_temporary_files_of_killed_writers_are_removed(tmp_path, gone, ago):
    """Also if the clock was set back since."""
    left = tmp_path / f".s.{gone}.0badcafe.tmp"
    left.write_text("x")
    os.utime(left, (time.time() - ago,) * 2)
    files.write_text(tmp_path / "s", "whole")
    assert os.listdir(tmp_path) == ["s"]


def test_what_another_container_writes_is_left_alone(tmp_path, gone):
    """Its process id does not exist here and the file is old, but it holds the lock."""
    theirs = tmp_path / f".s.{gone}.0badcafe.tmp"
    held = files.Lock(theirs, remove=False)
    os.utime(theirs, (1, 1))
    files.write_text(tmp_path / "s", "whole")
    assert theirs.exists()
    held.release()
    files.write_text(tmp_path / "s", "whole")
    assert not theirs.exists()


@pytest.mark.parametrize("supported", [True, False])
def test_a_mac_flushes_the_cache_of_the_drive(tmp_path, monkeypatch, supported):
    """fsync does not do that there; it is the fallback where F_FULLFSYNC fails."""
    asked = []

    def fcntl(file, how):
        asked.append(how)
        if not supported:
            raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(files.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(files.fcntl, "fcntl", fcntl)
    monkeypatch.setattr(files.os, "fsync", lambda file: asked.append("fsync"))
    files.write_text(tmp_path / "s", "x")
    assert asked == ([51] if supported else [51, "fsync"])


def test_a_lock_belongs_to_one_process_and_ends_with_it(tmp_path):
    path = tmp_path / "lock"
    held = files.Lock(path)
    assert files.try_lock(path) is None
    held.release()
    assert not path.exists()
    script = (
        "import pathlib, sys, time; from mlx_kda.files import Lock\n"
        "held = Lock(pathlib.Path(sys.argv[1]))\n"
        "print('held', flush=True); time.sleep(300)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        assert files.try_lock(path) is None
        process.kill()
    files.Lock(path).release()


def test_a_lock_file_that_is_removed_while_it_is_taken(tmp_path, monkeypatch):
    """Its holder releases it after we have opened it: we must hold the file under the path."""
    path, real = tmp_path / "lock", fcntl.flock
    path.touch()

    def flock(handle, how):
        monkeypatch.setattr(fcntl, "flock", real)
        path.unlink()
        return real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    held = files.Lock(path)
    assert held.is_there and files.try_lock(path) is None
    held.release()


def test_a_lock_file_of_another_process_is_not_removed(tmp_path):
    """Ours was removed, and another process has created one under the same name."""
    held = files.Lock(tmp_path / "lock")
    held.path.unlink()
    other = files.Lock(tmp_path / "lock")
    held.release()
    assert not held.is_there and other.is_there and files.try_lock(other.path) is None
    other.release()


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks(tmp_path, monkeypatch, gone, code):
    """Nothing keeps two processes apart there, but they run, and stale files are removed."""

    def flock(handle, how):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    first, second = files.Lock(tmp_path / "lock"), files.Lock(tmp_path / "lock")
    second.release()
    first.release()
    left = tmp_path / f".s.{gone}.0badcafe.tmp"
    left.touch()
    os.utime(left, (1, 1))
    files.write_text(tmp_path / "s", "whole")
    assert os.listdir(tmp_path) == ["s"]


def test_a_lock_makes_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.try_lock(tmp_path / "missing" / "lock")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "system, base, expected",
    [
        ("Darwin", "/x", "Library/Caches/mlx-kda"),
        ("Linux", "/x", "/x/mlx-kda"),
        ("Linux", "", ".cache/mlx-kda"),
    ],
)
def test_where_the_cache_is(monkeypatch, system, base, expected):
    monkeypatch.setattr(files.platform, "system", lambda: system)
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert files.cache_dir() == files.Path.home() / expected
