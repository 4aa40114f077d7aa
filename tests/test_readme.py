"""Every command and program in the README runs, on small models in place of the large ones."""

import io
import re
import shlex

import mlx.core as mx
import pytest
from helpers.paths import ROOT

from mlx_kda.cli.chat_commands import HELP
from mlx_kda.cli.main import COMMANDS, build_parser, main

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
COMMAND_LINES = [
    line
    for language, block in BLOCKS
    if language in ("", "bash")
    for part in block.splitlines()
    for line in part.split(" && ")
    if line.startswith("mlx-kda")
]
LARGE = "moonshotai/Kimi-Linear-48B-A3B-Instruct"


def test_commands_in_the_text_are_commands():
    for span in re.findall(r"`(mlx-kda [^`\n]*)`", README.replace("\n", " ")):
        words = shlex.split(span)
        assert words[1] in COMMANDS, span
    kinds = re.findall(r"`mlx-kda bench (\w+)", README.replace("\n", " "))
    assert kinds
    for kind in kinds:
        with pytest.raises(SystemExit, match="0"):
            build_parser().parse_args(["bench", kind, "--help"])


def test_options_in_the_text_are_options():
    """`--flag` in the running text belongs to the command that the sentence is about."""
    commands = build_parser()._subparsers._group_actions[0].choices.values()
    known = {
        flag for each in commands for action in each._actions for flag in action.option_strings
    }
    assert set(re.findall(r"`(?:\w+ )?(--[a-z-]+)[ `]", README)) <= known


def test_chat_commands_in_the_text_are_commands():
    assert set(re.findall(r"`(/[a-z]+)`", README)) <= set(re.findall(r"/[a-z]+", HELP))


@pytest.fixture(scope="module")
def place(tiny_hf, tmp_path_factory):
    """A folder in which the lines below run one after the other."""
    place = tmp_path_factory.mktemp("readme")
    (place / "book.txt").write_text("the rain in the plain falls mainly " * 8)
    return place


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_command_runs(line, place, tiny_hf, monkeypatch, capsys):
    """In the README's order; the 48B is a tiny checkpoint, the context the most that it has."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    argv = shlex.split(line.replace(LARGE, str(tiny_hf)).replace("1000000", "512"))[1:]
    if argv[0] == "convert":
        argv += ["--q-group-size", "32", "--dtype", "float32"]
    if argv[0] == "demo":
        argv += [str(tiny_hf), "--tokens", "64", "--max-tokens", "3"]
    if argv[0] == "generate":
        argv += ["--max-tokens", "4"]
    assert main(argv) == 0, capsys.readouterr().err


def test_the_python_program_runs(place, monkeypatch, capsys):
    (program,) = (block for language, block in BLOCKS if language == "python")
    monkeypatch.chdir(place)
    q = mx.random.normal((1, 5, 2, 32)) * 32**-0.5
    names = {"q": q, "k": q, "v": q, "g": -mx.ones(q.shape), "beta": mx.full((1, 5, 2), 0.5)}
    exec(compile(program, "README.md", "exec"), names)  # the README's own text
    assert capsys.readouterr().out and (place / "anchor.session").is_file()
    assert names["o"].shape == q.shape and names["state"].shape == (1, 2, 32, 32)
