"""The file of a session belongs to one program at a time: a second is told before it begins."""

import io
import os

import pytest
from helpers.paused import Pause, started, wait_for
from helpers.program import PROGRAM

from mlx_kda.cli.chat_commands import Chat
from mlx_kda.cli.main import main
from mlx_kda.cli.session_file import SessionFile
from mlx_kda.errors import UserError
from mlx_kda.session import Session


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept"


def saved(path, tiny_model, ids=(1, 2, 3)):
    session = Session(*tiny_model)
    session.prefill(list(ids))
    session.save(path)
    return session


@pytest.fixture
def chatting(tiny_mlx, folder):
    """A chat that waits for its second line, with its session in `talk`."""
    argv = ["chat", tiny_mlx, "--max-tokens", "4", "--session", folder / "talk"]
    with started([*PROGRAM, *argv]) as process:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        while process.stdout.read(1) != b"\n":
            assert process.poll() is None
        yield process


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_second_program_is_refused_before_it_begins(
    chatting, tiny_mlx, folder, capsys, monkeypatch, command
):
    monkeypatch.setattr("sys.stdin", io.StringIO("and I?\n"))
    monkeypatch.setattr("mlx_kda.cli.loading.load_model", lambda *args: pytest.fail("it began"))
    assert main([command, str(tiny_mlx), "--session", str(folder / "talk")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "in use by another mlx-kda" in err
    assert chatting.communicate(b"more\n")[1] == b"" and chatting.returncode == 0
    assert os.listdir(folder) == ["talk"]


def test_a_killed_program_s_file_goes_on(chatting, tiny_mlx, tiny_model, folder, monkeypatch):
    """kill -9 once the first turn is in the file: its message and answer are there."""
    wait_for((folder / "talk").exists, "the file", chatting)
    chatting.kill()
    chatting.wait()
    monkeypatch.setattr("sys.stdin", io.StringIO("more\n"))
    assert main(["chat", str(tiny_mlx), "--max-tokens", "3", "--session", f"{folder}/talk"]) == 0
    messages = Session.load(folder / "talk", *tiny_model).messages
    assert [m["content"] for m in messages if m["role"] == "user"] == ["hello", "more"]
    assert os.listdir(folder) == ["talk"]


def test_a_file_that_appears_before_it_is_held_is_gone_on_with(
    tiny_mlx, tiny_model, folder, monkeypatch
):
    from mlx_kda.cli import generate

    real = generate.check_session_file

    def session_file(path):
        found = real(path)
        saved(folder / "talk", tiny_model, ids=[9] * 30)
        return found

    monkeypatch.setattr(generate, "check_session_file", session_file)
    monkeypatch.setattr("sys.stdin", io.StringIO("a text"))
    argv = ["--raw", "--max-tokens", "2", "--session", str(folder / "talk")]
    assert main(["generate", str(tiny_mlx), *argv]) == 0
    assert Session.load(folder / "talk", *tiny_model).tokens[:30] == [9] * 30


def test_saving_to_the_file_that_is_kept(tiny_model, folder, capsys):
    session = saved(folder / "talk", tiny_model)
    with SessionFile(folder / "talk") as file:
        talk = Chat(session, file)
        talk.handle(f"/save {folder}/../{folder.name}/talk")
        session.prefill([4])
        talk.save()
    assert "another program" not in capsys.readouterr().err and os.listdir(folder) == ["talk"]
    assert Session.load(folder / "talk", *tiny_model).tokens == [1, 2, 3, 4]


def test_saving_to_a_file_that_another_keeps(tiny_model, folder, capsys):
    theirs = saved(folder / "theirs", tiny_model)
    with SessionFile(folder / "theirs") as other:
        Chat(saved(folder / "mine", tiny_model)).handle(f"/save {folder}/theirs")
        assert "in use by another mlx-kda" in capsys.readouterr().err
        theirs.prefill([7])
        other.save(theirs)
    assert Session.load(folder / "theirs", *tiny_model).tokens == [1, 2, 3, 7]
    assert sorted(os.listdir(folder)) == ["mine", "theirs"]


def test_two_names_of_one_file(tiny_model, folder, tmp_path):
    """A link is the file that it leads to, and stays a link."""
    session = saved(folder / "talk", tiny_model)
    (tmp_path / "link").symlink_to(folder / "talk")
    with SessionFile(tmp_path / "link") as file:
        with pytest.raises(UserError, match="in use"):
            SessionFile(folder / "talk")
        session.prefill([4])
        file.save(session)
    assert (tmp_path / "link").is_symlink() and os.listdir(folder) == ["talk"]
    assert Session.load(folder / "talk", *tiny_model).tokens == [1, 2, 3, 4]
    with SessionFile(folder / "talk"):
        pass


def test_kill_9_in_the_middle_of_a_save(tiny_mlx, tiny_model, folder, tmp_path, monkeypatch):
    """The file of before is whole, and what the killed program left goes with a later save."""
    saved(folder / "talk", tiny_model)
    before = (folder / "talk").read_bytes()
    pause = Pause("saving", tmp_path / "meet")
    argv = ["chat", tiny_mlx, "--max-tokens", "3", "--session", folder / "talk"]
    with started([*pause.program, *argv]) as process:
        process.stdin.write(b"hello\n")
        process.stdin.close()
        process.stdin = None
        pause.reached(process)
        process.kill()
        process.wait()
    assert (folder / "talk").read_bytes() == before
    (left,) = folder.glob(".talk.*.tmp")
    os.utime(left, (1, 1))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", str(tiny_mlx), "--max-tokens", "3", "--session", f"{folder}/talk"]) == 0
    assert os.listdir(folder) == ["talk"]
    assert Session.load(folder / "talk", *tiny_model).messages


class Saved:
    """A session whose saves take so many seconds by the clock and may end in an error."""

    def __init__(self, clock, seconds, error=None):
        self.clock, self.seconds, self.error, self.saves = clock, seconds, error, 0

    def save(self, path):
        self.saves += 1
        self.clock[0] += self.seconds
        if self.error:
            raise self.error
        path.write_text("x")


def test_saving_in_between_takes_a_twentieth_of_the_time(clock, tmp_path):
    session = Saved(clock, seconds=10)
    with SessionFile(tmp_path / "s") as file:
        assert file.save_if_due(session)
        assert not file.save_if_due(session)
        clock[0] += 199
        assert not file.save_if_due(session)
        clock[0] += 2
        assert file.save_if_due(session) and session.saves == 2


def test_saving_in_between_writes_a_megabyte_a_second_at_the_most(clock, tmp_path):
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 900_000_000)
    with SessionFile(tmp_path / "long") as file:
        clock[0] += 899
        assert not file.save_if_due(Saved(clock, 10))
        clock[0] += 2
        assert file.save_if_due(Saved(clock, 10))


def test_a_save_that_failed_slowly_is_not_tried_again_at_once(clock, tmp_path, capsys):
    failing = Saved(clock, 60, UserError("cannot save it: No space left on device"))
    with SessionFile(tmp_path / "s") as file:
        for _ in range(3):
            assert not file.save_if_due(failing)
        assert failing.saves == 1 and capsys.readouterr().err.count("No space left") == 1
        clock[0] += 1300
        assert not file.save_if_due(failing) and failing.saves == 2
        with pytest.raises(UserError, match="No space left"):
            file.save(failing)  # at the end, whatever it takes


def test_a_session_changed_by_another_program_is_not_overwritten(tiny_model, folder, capsys):
    """It is saved beside that, which is said once."""
    session = saved(folder / "s", tiny_model)
    with SessionFile(folder / "s") as file:
        file.save(session)
        saved(folder / "s", tiny_model, ids=[9] * 7)
        theirs = (folder / "s").read_bytes()
        session.prefill([4])
        file.save(session)
        file.save(session)
        assert (folder / "s").read_bytes() == theirs
        assert Session.load(folder / "s-2", *tiny_model).tokens == [1, 2, 3, 4]
        assert capsys.readouterr().err.count("changed by another program") == 1
        (folder / "s-2").unlink()  # what is gone is nobody's work
        file.save(session)
        assert capsys.readouterr().err == ""
    assert sorted(os.listdir(folder)) == ["s", "s-2"]


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match="cannot be written: No such file"):
        SessionFile(tmp_path / "none" / "talk")
