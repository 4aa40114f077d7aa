"""A chat at a terminal, driven as a person types: prompt_toolkit, and without it plain input."""

import os
import signal

import pytest
from helpers.paused import Pause

import mlx_kda
from mlx_kda.convert import convert
from mlx_kda.session import Session

pexpect = pytest.importorskip("pexpect")
pytest.importorskip("prompt_toolkit")

STATUS = r"\[[^\]]*tokens/s \| context [\d,]+ of 512 \| cache [^\]]* prefilled\]"


@pytest.fixture
def chat(tiny_mlx, tmp_path, at_terminal):
    """Starts a chat at a terminal, with prompt_toolkit or, if ``plain``, where it is missing."""

    def start(*argv, plain=False, **options):
        if plain:  # a module of that name that cannot be imported
            hidden = tmp_path / "hidden" / "prompt_toolkit"
            hidden.mkdir(parents=True, exist_ok=True)
            (hidden / "__init__.py").write_text("raise ImportError\n")
            paths = [str(hidden.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            options["PYTHONPATH"] = os.pathsep.join(paths)
        child = at_terminal("chat", tiny_mlx, *argv, **options)
        child.expect("Ctrl-D ends")
        return child

    return start


def end(child):
    """Ctrl-D, and the exit status."""
    child.send("\x04")
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


@pytest.mark.parametrize("plain", [False, True], ids=["prompt_toolkit", "plain"])
def test_a_session_at_a_terminal(chat, tiny_mlx, tmp_path, plain):
    file = tmp_path / "talk"
    child = chat("--max-tokens", "6", "--session", str(file), plain=plain)
    child.send("hello\r")
    child.expect(STATUS)
    assert "0 reused" in child.after
    child.send("first line\\\rsecond line\r")
    child.expect(STATUS)
    assert "0 reused" not in child.after
    child.send("/edit\r")
    child.expect("removed: first line")
    child.send(" and more\r")  # added to what is there to be changed
    child.expect(STATUS)
    child.send("/help\r")
    child.expect("/undo")
    child.send("/set temp 0.0\r")
    child.expect("temp 0.0")
    child.send("/fork aside\r")
    child.expect("(?s)returns to 'main'.*>")  # at the prompt, when the session was saved
    child.send("\x03")  # Ctrl-C at the prompt ends nothing
    child.expect("Ctrl-D ends")
    assert end(child) == 0

    session = Session.load(file, *mlx_kda.load(tiny_mlx))
    said = [m["content"] for m in session.messages if m["role"] == "user"]
    between = " " if plain else "\n"  # readline edits one line
    assert said == ["hello", f"first line{between}second line and more"]
    child = chat("--session", str(file), plain=plain)
    child.expect("continuing a conversation of 4 messages")
    assert end(child) == 0


def test_ctrl_c_stops_an_answer(chat, tmp_path):
    pause = Pause("answering:9", tmp_path / "pause")
    child = chat("--max-tokens", "450", program=pause.program)
    child.send("hello\r")
    pause.reached()
    child.sendintr()
    pause.end()
    child.expect(r"\(stopped\)")
    child.expect(STATUS)
    child.send("/stats\r")
    child.expect("context: ")
    assert end(child) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_the_prompt_saves_the_session(chat, tiny_mlx, tmp_path, number):
    """The terminal is closed, or the machine goes down: what was said is on disk."""
    file = tmp_path / "talk"
    child = chat("--max-tokens", "6", "--session", str(file))
    child.send("hello\r")
    child.expect(STATUS)
    child.kill(number)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 128 + number
    assert len(Session.load(file, *mlx_kda.load(tiny_mlx)).messages) == 2


def test_a_signal_while_answering_saves_the_session(chat, tiny_mlx, tmp_path):
    file = tmp_path / "talk"
    pause = Pause("answering:9", tmp_path / "pause")
    child = chat("--max-tokens", "450", "--session", str(file), program=pause.program)
    child.send("hello\r")
    pause.reached()
    child.kill(signal.SIGTERM)
    pause.end()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 128 + signal.SIGTERM
    messages = Session.load(file, *mlx_kda.load(tiny_mlx)).messages
    assert [m["role"] for m in messages] == ["user", "assistant"]


def test_the_status_is_shown_after_an_answer_only(chat):
    child = chat("--max-tokens", "6")
    child.send("hello\r")
    child.expect(STATUS)
    child.send("\r")
    child.send("/set temp 0.5\r")
    child.expect("temp 0.5")
    child.send("/undo\r")
    child.expect("removed: hello")
    child.send("/stats\r")
    child.expect("session checkpoints")
    assert "prefilled]" not in child.before
    child.send("again\r")
    child.expect(STATUS)
    assert end(child) == 0


def test_a_paste_of_many_lines_is_one_message(chat, tiny_mlx, tmp_path):
    """Brackets around a paste are understood with prompt_toolkit and by readline."""
    file = tmp_path / "talk"
    child = chat("--max-tokens", "3", "--session", str(file))
    child.send("\x1b[200~one\rtwo \u6f22\rthree\x1b[201~\r")
    child.expect(STATUS)
    child.send("nul \x00 byte and \x1b[31m colour\r")
    child.expect(STATUS)
    assert end(child) == 0
    first, _, second, _ = Session.load(file, *mlx_kda.load(tiny_mlx)).messages
    assert first["content"] == "one\ntwo \u6f22\nthree" and "nul" in second["content"]


@pytest.mark.parametrize("plain", [False, True], ids=["prompt_toolkit", "plain"])
def test_bytes_that_are_no_text_become_replacement_characters(chat, tiny_mlx, tmp_path, plain):
    """A file in Latin-1 pasted, say; the message used to be refused in words about templates."""
    file = tmp_path / "talk"
    child = chat("--max-tokens", "3", "--session", str(file), plain=plain)
    os.write(child.child_fd, b"caf\xe9 \xff\xfe!\r")
    child.expect(STATUS)
    assert end(child) == 0
    first, _ = Session.load(file, *mlx_kda.load(tiny_mlx)).messages
    said = first["content"]  # readline itself drops some such bytes
    assert said.startswith("caf") and "\ufffd" in said and said.endswith("!")


def test_slow_16_bits_on_a_cpu_are_told_to_a_person(tiny_hf, tmp_path, at_terminal):
    argv = ["--prompt", "x", "--max-tokens", "1"]
    for dtype, told in (("bfloat16", True), ("float32", False)):
        convert(tiny_hf, tmp_path / dtype, dtype=dtype)
        child = at_terminal("generate", tmp_path / dtype, *argv)
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0
        assert ("convert with --dtype float32" in child.before) == told
