"""``mlx-kda chat`` over a pipe: the answers, the commands, Ctrl-C and the end of input."""

import io
import signal

import pytest
from helpers.tiny import difference
from tolerances import MODEL_SPLIT

from mlx_kda.cli import output
from mlx_kda.cli.chat_commands import Chat
from mlx_kda.cli.main import main
from mlx_kda.cli.signals import Stopped
from mlx_kda.context import Context
from mlx_kda.generate import decode_text
from mlx_kda.session import Session
from mlx_kda.transcript import chat_ids


@pytest.fixture
def chat(tiny_mlx, capsys, monkeypatch):
    """Runs the command on the given input; (status, stdout, stderr)."""

    def call(text, *argv):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        status = main(["chat", str(tiny_mlx), "--max-tokens", "10", *argv])
        return (status, *capsys.readouterr())

    return call


def answers(out):
    """Its lines; other characters that end lines may be part of an answer."""
    return out.split("\n")[:-1]


def cold_answers(tiny_model, texts):
    """The answers to ``texts`` when every turn is read from its first token on a new cache."""
    model, tokenizer = tiny_model
    end = tokenizer.encode("<|im_end|>", allow_special=True)
    ids, answers = [], []
    for text in texts:
        turn = chat_ids(tokenizer, [{"role": "user", "content": text}])
        ids += turn
        context = Context(model)
        context.prefill(ids)
        pieces = list(decode_text(context, tokenizer, max_tokens=10))
        answers.append("".join(piece.text for piece in pieces))
        ids += [p.token for p in pieces if p.statistics.finish_reason != "stop"] + end
    return answers


def test_a_piped_chat_equals_a_cold_run(chat, tiny_model):
    texts = ["hello there", "and then?", "the end"]
    status, out, err = chat("\n".join(texts) + "\n")
    assert status == 0 and err == ""
    assert out == "".join(answer + "\n" for answer in cold_answers(tiny_model, texts))


def test_exit_ends_and_blank_lines_are_skipped(chat):
    assert chat("/exit\nhello\n")[:2] == (0, "")
    assert chat("\n   \n")[:2] == (0, "")
    assert chat("")[:2] == (0, "")


def test_reset_forgets(chat):
    _, out, err = chat("hello\n/reset\nhello\n")
    half = len(out) // 2
    assert out[:half] == out[half:] and "new conversation" in err


def test_stats_and_help(chat):
    _, out, err = chat("/stats\nhello\n/stats\n/help\n/frob\n")
    assert "no answer yet" in err and "tokens/s" in err and "of 512" in err
    assert "/reset" in err and "unknown command /frob" in err
    assert "tokens/s" not in out


def test_a_turn_stopped_while_reading_says_how_to_take_it_back(tiny_model, monkeypatch, capsys):
    """It said "0.0 tokens/s", and the next message read the rest of it without a word."""
    talk, session = talk_with(tiny_model)

    def send(text, **options):
        signal.raise_signal(signal.SIGINT)
        raise Stopped

    monkeypatch.setattr(session, "send", send)
    assert talk.handle("hello")
    assert "(stopped while reading; /undo removes the message)" in capsys.readouterr().err
    assert "tokens/s" not in talk.status() and "this turn" in talk.status()


def test_two_slashes_begin_a_message_with_one(chat, tiny_model):
    status, out, err = chat("//etc/hosts is what?\n")
    assert (status, err) == (0, "")
    assert out == cold_answers(tiny_model, ["/etc/hosts is what?"])[0] + "\n"
    assert "//etc/hosts sends a message" in chat("/etc/hosts is what?\n")[2]


def test_conversations_that_the_file_does_not_keep_are_named(chat, tmp_path):
    file = str(tmp_path / "talk.session")
    err = chat("hello\n/fork other\nhello\n", "--session", file)[2]
    assert f"{file} holds 'other'; not saved: 'main'" in err
    assert "not saved" not in chat("hello\n", "--session", file)[2]


def test_a_message_too_long_is_refused_and_the_talk_goes_on(chat):
    status, out, err = chat("z" * 600 + "\nhello\n")
    assert status == 0
    assert "mlx-kda: " in err and "longer than the model's context" in err
    assert out == chat("hello\n")[1]


def talk_with(tiny_model, **settings):
    """A Talk and its session."""
    session = Session(*tiny_model)
    talk = Chat(session)
    talk.set_options(settings)
    return talk, session


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(
    tiny_model, monkeypatch, capsys, signal_after
):
    talk, session = talk_with(tiny_model, max_tokens=60)
    signal_after(3, signal.SIGINT)
    before = signal.getsignal(signal.SIGINT)
    assert talk.handle("hello")
    assert signal.getsignal(signal.SIGINT) is before
    assert "(stopped)" in capsys.readouterr().err
    assert talk.last.generation_tokens == 3 and talk.last.finish_reason == "interrupted"
    read = session.tokens

    # the next turn goes on from there and equals a run that reads it all anew
    monkeypatch.setattr(output, "write", lambda text: None)
    talk.handle("/set max-tokens 5")
    talk.handle("go on")
    assert talk.last.reused_tokens == len(read)
    assert session.tokens[: len(read)] == read
    cold = Context(tiny_model[0])
    cold.prefill(session.tokens)
    assert difference(session.context.logits, cold.logits) < MODEL_SPLIT


def test_ctrl_c_while_reading_stops_between_chunks(tiny_model, monkeypatch):
    talk, session = talk_with(tiny_model, max_tokens=5, prefill_step=8)
    model = tiny_model[0]
    prefill, calls = model.__call__, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return prefill(*args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", interrupted)
    assert talk.handle("a long message " * 4)
    assert len(session.tokens) == 16
    assert talk.last.finish_reason == "interrupted" and talk.last.generation_tokens == 0


def test_undo_regen_and_edit(chat):
    _, out, _ = chat("hello\n/regen\n")
    first, again = answers(out)
    assert first == again
    assert answers(chat("hello\n/undo\nother\n")[1])[1] == chat("other\n")[1].strip("\n")
    _, out, err = chat("hello\n/edit other\n/undo\n/undo\n")
    assert answers(out)[1] == chat("other\n")[1].strip("\n")
    assert "removed: other" in err and "no message to remove" in err
    assert "no message to edit" in chat("/edit x\n")[2]
    assert "no message to answer" in chat("/regen\n")[2]


def test_forks(chat):
    _, out, err = chat(
        "hello\n/fork aside\nand more\n/switch main\nand more\n/switch\n/switch x\n/fork main\n"
    )
    lines = answers(out)
    assert len(lines) == 3 and lines[1] == lines[2]
    assert "returns to 'main'" in err and "aside: " in err and "(in use)" in err
    assert "no other conversation 'x'" in err and "'main' exists already" in err


def test_save_load_and_resume(chat, tmp_path):
    file = tmp_path / "talk"
    whole = answers(chat("hello\nmore\nthe end\n")[1])
    parts = answers(chat(f"hello\n/save {file}\n")[1])
    parts += answers(chat("more\n", "--resume", str(file), "--session", str(file))[1])
    _, out, err = chat(f"/load {file}\nthe end\n")
    assert parts + answers(out) == whole
    assert "4 messages" in err
    for words in (["/save\n"], ["/load\n"], [f"/load {tmp_path}/none\n"]):
        status, _, err = chat(*words)
        assert status == 0 and err.count("mlx-kda: ") == 1


def test_session_is_saved_at_the_end_and_gone_on_with(chat, tmp_path):
    file = str(tmp_path / "talk")
    whole = answers(chat("hello\nmore\n")[1])
    first = chat("hello\n", "--session", file)
    second = chat("more\n", "--session", file)
    assert first[0] == second[0] == 0
    assert answers(first[1]) + answers(second[1]) == whole
    status, _, err = chat("", "--session", file, "--policy", "int8")
    assert status == 2 and "saved under the policy exact" in err
    status, _, err = chat("", "--session", file, "--system", "x")
    assert status == 2 and "another system message" in err
    status, _, err = chat("", "--resume", str(tmp_path / "none"))
    assert status == 2 and "cannot be read" in err


def test_system_and_set(chat):
    _, out, err = chat("/system be brief\nhello\n/system\nhello\n")
    first, _ = answers(out)
    assert first == chat("hello\n", "--system", "be brief")[1].strip("\n")
    assert first != chat("hello\n")[1].strip("\n")
    assert "system message removed" in err
    _, out, err = chat("/set max-tokens 3\nhello\n/set\n/set temp 0.5\n/set speculate on\n/stats\n")
    assert len(out) < len(chat("hello\n")[1])
    assert "max-tokens 3" in err and "temp 0.5" in err and "speculate on" in err
    err = chat("/set heat 3\n/set temp hot\n/set speculate maybe\n")[2]
    assert err.count("mlx-kda: ") == 3 and "unknown option heat" in err and "on or off" in err
    assert "seed none" in chat("/set seed 3\n/set seed none\n")[2]


def test_a_policy(chat):
    _, out, err = chat("hello\n/stats\n", "--policy", "window:8+2,int8")
    assert out and "policy window:8+2,int8" in err and "the last 8 tokens" in err
    with pytest.raises(SystemExit, match="2"):
        chat("hello\n", "--policy", "half")


def test_a_backslash_joins_lines(chat, tmp_path):
    chat("one\\\ntwo\n", "--session", str(tmp_path / "s"))
    assert "removed: one\ntwo" in chat("/undo\n", "--session", str(tmp_path / "s"))[2]


def test_status_line(tiny_model):
    talk, _ = talk_with(tiny_model, max_tokens=4)
    assert talk.status().startswith("context 0 of 512 | cache ")
    talk._answer(lambda **options: talk.session.send("hello", **options))
    talk._answer(lambda **options: talk.session.send("more", **options))
    s = talk.last
    for words in (
        f"{s.generation_tps:.1f} tokens/s",
        f"context {len(talk.session.tokens)} of 512",
        "peak ",
        f"{s.reused_tokens} reused, {s.prefilled_tokens} prefilled",
    ):
        assert words in talk.status()
