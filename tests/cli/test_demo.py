"""``mlx-kda demo``: the whole way on a small checkpoint, and what it says where there is none."""

import io
import os
import re
import signal
import tempfile
from pathlib import Path

import mlx.core as mx
import pytest
from helpers.paused import Pause, started

import mlx_kda
from mlx_kda import demo, files
from mlx_kda.cli import chat as chat_command
from mlx_kda.cli import demo as demo_command
from mlx_kda.cli.main import main
from mlx_kda.session import Session

SHARED_TEMPORARY = Path(tempfile.gettempdir())


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """The folder for temporary files, empty."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_whole_way(tiny_hf, scratch, capsys):
    assert main(["demo", str(tiny_hf), "--max-tokens", "6", "--tokens", "150"]) == 0
    out = capsys.readouterr().out
    order = [
        f"Converting {tiny_hf} to 4 bits",
        "peak memory",
        "bits per weight; not quantised: ",
        *(f"> {question}" for question in demo.QUESTIONS),
        demo.OPENING,
        "hidden in a prompt of 150 tokens",
        "KDA states",
        "tokens not processed again; the same answer",
        "KDA layers: MLX's operations: ",
        "  prefill: ",
        "  decode: ",
        "cache policy: exact, the default",
        "mlx-kda convert moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "mlx-kda chat kimi-4bit",
    ]
    places = [out.index(text) for text in order]
    assert places == sorted(places)
    assert out.count(" reused") == 2
    assert list(scratch.iterdir()) == [], "the converted model is not left behind"


def test_the_small_checkpoint_does_it_all_right(scratch, capsys):
    """What the README's command prints, with a short text to keep it quick."""
    assert main(["demo", "--tokens", "600", "--max-tokens", "30"]) == 0
    out = capsys.readouterr().out
    assert "A mechanical device that prevents a vessel from moving.\n" in out
    assert "I am a tiny language model with Kimi Delta Attention, trained for tests.\n" in out
    assert out.count(f"The pass key is {demo.KEY}.\n") == 2 and "\n  right\n" in out
    assert "wrong" not in out
    assert len(out.splitlines()) < 60


def test_the_policy_asked_for_is_in_force(tiny_model):
    model, tokenizer = tiny_model
    session, _ = demo_command._find_key(model, tokenizer, "window:32+4", 200)
    assert str(session.policy) == "window:32+4"
    assert all("last 32" in layer.in_force for layer in session.layers() if layer.kind == "mla")


def test_a_resumed_session_that_differs_ends_the_demo(tiny_model, tmp_path, monkeypatch):
    model, tokenizer = tiny_model
    session = Session(model, tokenizer)
    for _ in session.send("hello", max_tokens=4):
        pass
    other = Session(model, tokenizer)
    monkeypatch.setattr(Session, "load", lambda *args: other)
    with pytest.raises(mlx_kda.errors.UserError, match="answered differently"):
        demo_command._resume(session, "", tmp_path / "x")


def test_kernels_are_named_with_their_self_check(tiny_mlx, capsys):
    """As on a Mac, with the emulator in place of the GPU."""
    model, tokenizer = mlx_kda.load(tiny_mlx, runner="emulator-fast")
    demo_command._explain(Session(model, tokenizer, "int8"), "float32", asked=True)
    out = capsys.readouterr().out
    assert "KDA layers: kernels by emulator-fast: asked for" in out
    assert re.search(r"  prefill: kda_chunk: .*\n  decode: kda_decode: ", out)
    assert re.search(r"self-check: (\d) of \1 kernels agree", out)
    assert "cache policy: int8, as requested" in out and "latents in 8 bits" in out


@pytest.mark.parametrize("tokens", [300, 1000])
def test_a_haystack_is_as_long_as_asked_and_holds_the_key_once(tiny_model, tokens):
    tokenizer = tiny_model[1]
    text = demo.haystack(tokenizer, tokens)
    assert abs(len(tokenizer.encode(text)) - tokens) < 60
    assert text.count(demo.KEY) == 1
    sentences = text.split("\n\n")[1].split(". ")
    assert len(set(sentences)) == len(sentences)


def test_no_place_for_temporary_files_is_one_line(tiny_hf, monkeypatch, capsys):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", none)
    assert main(["demo", str(tiny_hf)]) == 2
    err = capsys.readouterr().err
    assert "set TMPDIR" in err and err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_nothing(tiny_hf, tmp_path, number):
    """Run in a folder that cannot be written, too."""
    here = tmp_path / "here"
    here.mkdir()
    here.chmod(0o555)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    # MLX's CPU build keeps what it compiles in "mlx" there; compiling it anew takes half a minute.
    compiled = SHARED_TEMPORARY / "mlx"
    compiled.mkdir(exist_ok=True)
    (temporary / "mlx").symlink_to(compiled)
    pause = Pause("answering:3", tmp_path / "pause")
    command = [*pause.program, "demo", tiny_hf, "--tokens", "250"]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with started(command, cwd=here, env=environment, text=True) as process:
        pause.reached(process)
        assert len(list(temporary.iterdir())) == 2
        process.send_signal(number)
        pause.end()
        _, err = process.communicate()
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert [path.name for path in temporary.iterdir()] == ["mlx"]
    assert list(here.iterdir()) == []


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package as it is where no source checkout is around it; the folder it is run in."""
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "site-packages" / "mlx_kda" / "demo.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("argv", "advice"), [("demo", "demo SRC"), ("chat", "chat MODEL")])
def test_without_its_checkpoint_it_says_what_to_do(installed, cache, capsys, argv, advice):
    assert main([argv]) == 2
    err = capsys.readouterr().err
    assert "examples/tiny-kimi-linear was not found" in err and f"mlx-kda {advice}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("place", ["current folder", "checkout of an editable package"])
def test_the_checkpoint_is_found(installed, monkeypatch, place):
    checkout = installed if place == "current folder" else installed / "checkout"
    (checkout / demo.CHECKPOINT).mkdir(parents=True)
    (checkout / demo.CHECKPOINT / "config.json").write_text("{}")
    if place != "current folder":
        monkeypatch.setattr(demo, "__file__", str(checkout / "mlx_kda" / "demo.py"))
    assert demo.find_checkpoint(None).resolve() == checkout / demo.CHECKPOINT


# The model of a chat that names none


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setattr(demo, "cache_dir", lambda: folder)
    return folder


def stamps(folder):
    return {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}


def test_a_chat_without_a_model_converts_the_small_one_once(cache, capsys, monkeypatch):
    def chat():
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        assert main(["chat"]) == 0
        return capsys.readouterr().err

    first, (folder,) = chat(), cache.iterdir()
    before = stamps(folder)
    second = chat()
    assert "converting" in first and str(folder) in first and "tiny-kimi-linear" in first
    assert "converting" not in second and "tiny-kimi-linear" in second
    assert stamps(folder) == before
    assert mx.load(str(folder / "model.safetensors"))


def test_what_was_converted_serves_where_the_checkout_is_not(cache, tiny_hf, monkeypatch):
    with monkeypatch.context() as here:
        here.setattr(demo, "find_checkpoint", lambda *args: tiny_hf)
        folder = demo.default_model(lambda line: None)
    monkeypatch.setattr(demo, "__file__", str(cache / "site-packages" / "mlx_kda" / "demo.py"))
    monkeypatch.chdir(cache)
    assert demo.default_model(lambda line: None) == folder
    (folder / "config.json").unlink()
    with pytest.raises(mlx_kda.errors.UserError, match="was not found"):
        demo.default_model(lambda line: None)


def test_a_stale_small_model_is_made_anew(cache, tiny_hf, monkeypatch):
    """Another checkpoint under the same name, as after a pull of the repository."""
    folder = demo.default_model(lambda line: None)
    before = stamps(folder)
    monkeypatch.setattr(demo, "find_checkpoint", lambda *args: tiny_hf)
    assert demo.default_model(lambda line: None) == folder
    assert stamps(folder) != before
    assert mlx_kda.load(folder)[0].args.hidden_size == mlx_kda.load(tiny_hf)[0].args.hidden_size


def test_a_cache_folder_that_cannot_be_made_is_one_line(cache, capsys):
    cache.write_text("a file in its place")
    assert main(["chat"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("mlx-kda: ") and str(cache) in lines[-1]


def test_a_model_that_is_named_is_taken(tiny_mlx, monkeypatch, capsys):
    monkeypatch.setattr(chat_command, "_default_model", lambda: pytest.fail("not asked for"))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", str(tiny_mlx)]) == 0
    assert files.cache_dir().name == "mlx-kda"
