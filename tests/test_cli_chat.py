"""``mlx-kda chat`` over a pipe: the answers, the commands, Ctrl-C and the end of input."""

import io
import signal

import pytest
from helpers.program import run

from mlx_kda.cli import chat as command
from mlx_kda.cli import common
from mlx_kda.cli.main import main
from mlx_kda.context import Context
from mlx_kda.generate import decode_text
from mlx_kda.messages import chat_ids
from mlx_kda.session import Session


@pytest.fixture
def chat(tiny_mlx, capsys, monkeypatch):
    """Runs the command on the given input; (status, stdout, stderr)."""

    def call(text, *argv):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        status = main(["chat", str(tiny_mlx), "--max-tokens", "10", *argv])
        return (status, *capsys.readouterr())

    return call


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
    assert out[:half] == out[half:] and "forgotten" in err


def test_stats_and_help(chat):
    _, out, err = chat("/stats\nhello\n/stats\n/help\n/frob\n")
    assert "nothing answered yet" in err and "tokens/s" in err and "of 512" in err
    assert "/reset" in err and "no command /frob" in err
    assert "tokens/s" not in out


def test_a_message_too_long_is_refused_and_the_talk_goes_on(chat):
    status, out, err = chat("z" * 600 + "\nhello\n")
    assert status == 0
    assert "mlx-kda: " in err and "longer than the model's context" in err
    assert out == chat("hello\n")[1]


def test_system_message(chat):
    assert chat("hello\n", "--system", "be brief")[1] != chat("hello\n")[1]


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(tiny_model, monkeypatch, capsys):
    model, tokenizer = tiny_model
    conversation = Session(model, tokenizer)
    talk = command.Chat(conversation, {"max_tokens": 60, "stop_ids": []})
    written = []

    def write(text):
        written.append(text)
        if len(written) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(common, "write", write)
    before = signal.getsignal(signal.SIGINT)
    assert talk.take("hello")
    assert signal.getsignal(signal.SIGINT) is before
    assert "(stopped)" in capsys.readouterr().err
    assert talk.last.generation_tokens == 3 and talk.last.finish_reason == "interrupted"
    read = list(conversation.context.tokens)

    # the next turn goes on from there and equals a run that reads it all anew
    monkeypatch.setattr(common, "write", lambda text: None)
    talk.options["max_tokens"] = 5
    talk.take("go on")
    assert talk.last.reused_tokens == len(read)
    assert conversation.context.tokens[: len(read)] == read
    cold = Context(model)
    cold.prefill(conversation.context.tokens)
    assert abs(cold.logits - conversation.context.logits).max() < 1e-5


def test_ctrl_c_while_reading_stops_between_chunks(tiny_model, monkeypatch, capsys):
    model, tokenizer = tiny_model
    conversation = Session(model, tokenizer)
    talk = command.Chat(conversation, {"max_tokens": 5, "prefill_step": 8})
    prefill = model.__call__
    calls = []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return prefill(*args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", interrupted)
    talk.take("a long message " * 4)
    assert len(conversation.context.tokens) == 16
    assert talk.last.finish_reason == "interrupted" and talk.last.generation_tokens == 0


def test_a_second_ctrl_c_interrupts():
    with pytest.raises(KeyboardInterrupt), command.stop_on_interrupt() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        signal.raise_signal(signal.SIGINT)


def test_the_program_over_a_real_pipe(tiny_mlx, chat):
    result = run("chat", str(tiny_mlx), "--max-tokens", "10", stdin="hello\nmore\n")
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout == chat("hello\nmore\n")[1]


def test_no_control_characters_reach_a_terminal(monkeypatch):
    """What a model writes cannot drive the terminal; a pipe gets it as it is."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    text = "a\x1b[31mb\tc\n\u6f22"
    for stream, wanted in ((Terminal(), "a[31mb\tc\n\u6f22"), (io.StringIO(), text)):
        monkeypatch.setattr("sys.stdout", stream)
        common.write(text)
        assert stream.getvalue() == wanted
