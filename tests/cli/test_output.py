"""What is printed: plain and whole in a pipe, within a terminal's width, styled where allowed."""

import io
import json
import os
import re
import shutil
import sys

import pytest

from mlx_kda.bench.results import Benchmark
from mlx_kda.cli import output
from mlx_kda.cli.main import main
from mlx_kda.cli.measure import collect
from mlx_kda.cli.output import print_table


class Terminal(io.StringIO):
    """What a command prints to at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Makes both streams a terminal of so many columns, and gives what is printed."""

    def make(columns=100, term="xterm", **environment):
        for name, value in {"TERM": term, "COLUMNS": str(columns), **environment}.items():
            monkeypatch.setenv(name, value)
        shown = Terminal()
        monkeypatch.setattr(sys, "stdout", shown)
        monkeypatch.setattr(sys, "stderr", shown)
        return shown

    monkeypatch.delenv("NO_COLOR", raising=False)
    return make


@pytest.fixture(scope="module")
def long(tiny_mlx, tmp_path_factory):
    """A converted folder whose path is longer than any line that somebody may have thought of."""
    folder = tmp_path_factory.mktemp("long") / ("name " * 40).strip() / "with :key: [bold]"
    return shutil.copytree(tiny_mlx, folder)


COMMANDS = {
    "info": ["info", "MODEL"],
    "plan": ["plan", "MODEL", "--context", "500"],
    "doctor": ["doctor", "MODEL"],
    "doctor with kernels": ["doctor", "MODEL", "--runner", "emulator-fast"],
    "convert --plan": ["convert", "SRC", "OUT", "--q-bits", "4", "--plan"],
    "convert": ["convert", "SRC", "OUT", "--q-bits", "4"],
    "verify": ["verify", "MODEL"],
    "generate": ["generate", "MODEL", "--prompt", "x", "--max-tokens", "3", "--stats"],
    "bench": ["bench", "op", "--tokens", "1", "--heads", "1", "--dim", "32", "--budget", "0.1"],
}
NAMES_ITS_FOLDER = ("plan", "convert --plan", "convert", "verify")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_gets_plain_whole_lines(command, long, tiny_hf, tmp_path, monkeypatch, capsys):
    for name, value in {"COLUMNS": "40", "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}.items():
        monkeypatch.setenv(name, value)
    words = {"MODEL": str(long), "SRC": str(tiny_hf), "OUT": str(tmp_path / ("long" * 40))}
    assert main([words.get(word, word) for word in COMMANDS[command]]) == 0
    out, err = capsys.readouterr()
    assert out
    for line in (out + err).splitlines():
        if line != out.split("\n")[0] or command != "generate":  # (a model says what it likes)
            assert line == line.rstrip() and "\x1b" not in line and "\u2026" not in line
    if command in NAMES_ITS_FOLDER:
        assert words["OUT" if "convert" in command else "MODEL"] in out
    if command == "info":  # each of its rows is one line
        assert len(out.splitlines()) == len([*re.finditer(r"(?m)^.{16}\S", out)])


def test_a_benchmarks_row_has_no_trailing_blanks(capsys):
    """Where its last columns are empty."""
    columns = dict.fromkeys(("name", "seconds", "failed"), "x")
    assert collect(Benchmark("b", "what", columns), iter([{"name": "ours"}])) == [{"name": "ours"}]
    assert capsys.readouterr().err == "ours\n"


def test_a_table_never_cuts_a_value(terminal):
    """On a terminal words are kept whole, and a row too wide for that is printed cell by cell."""
    rows = [("window:4096+16,int8", "22.3 MB", "1,234,567 B"), ("exact", "1 MB", "3 B")]
    head = ("policy", "KDA states", "total")
    shown = terminal(60)
    print_table(rows, head, right=head[1:])
    assert shown.getvalue() == (
        "policy               KDA states        total\n"
        "window:4096+16,int8     22.3 MB  1,234,567 B\n"
        "exact                      1 MB          3 B\n"
    )
    shown = terminal(37)
    print_table(rows, head, right=head[1:])
    assert shown.getvalue().splitlines() == [
        *("policy: window:4096+16,int8", "  KDA states: 22.3 MB", "  total: 1,234,567 B"),
        *("policy: exact", "  KDA states: 1 MB", "  total: 3 B"),
    ]
    shown = terminal(20)
    print_table([("a", "one two three four five six"), ("b", "x" * 40)])
    assert re.sub(r"\s", "", shown.getvalue()) == "aonetwothreefourfivesix" + "b" + "x" * 40


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("command", ["info", "plan", "verify"])
def test_every_value_is_there_at_any_width(tiny_mlx, terminal, capsys, command, columns):
    argv = [command, str(tiny_mlx), *(["--context", "500"] if command == "plan" else [])]
    assert main(argv) == 0
    whole = capsys.readouterr().out
    shown = terminal(columns)
    assert main(argv) == 0
    told = shown.getvalue()
    words = [{word.strip(":") for word in text.split()} for text in (whole, told)]
    assert words[0] <= words[1]
    assert "\u2026" not in told and not re.search(r"[ ]$", told, re.M)
    if command == "info":
        assert max(map(len, told.splitlines())) <= columns


@pytest.mark.parametrize("environment", [{"term": "dumb"}, {"NO_COLOR": "1"}])
def test_text_is_plain_where_styles_are_not_wanted(terminal, environment):
    shown = terminal(**environment)
    output.heading("A heading")
    output.detail("a detail")
    output.paragraph("a line")
    assert shown.getvalue() == "\nA heading\n  a detail\na line\n"
    shown = terminal()
    if "NO_COLOR" in environment:
        os.environ.pop("NO_COLOR")
    output.heading("A heading")
    assert shown.getvalue() == "\n\x1b[1mA heading\x1b[0m\n"


def test_no_spinner_and_no_bar_on_a_dumb_terminal(terminal):
    shown = terminal(term="dumb")
    with output.status("loading"):
        pass
    with output.progress("reading") as bar:
        for done in (0, 500, 1000):
            bar(done, 1000)
    assert shown.getvalue() == ""


def test_no_color_leaves_a_spinner_without_colours(terminal):
    shown = terminal(NO_COLOR="1")
    with output.status("loading"):
        pass
    assert "loading" in shown.getvalue() and not re.search(r"\x1b\[[\d;]*m", shown.getvalue())


def test_a_narrow_terminal_shows_how_far_it_is(terminal):
    shown = terminal(40)
    with output.progress("converting", unit="MB") as bar:
        bar(50_000, 98_000)
    assert "converting 50,000/98,000 MB" in shown.getvalue()
    assert "\u2026" not in shown.getvalue()


def test_progress_of_several_parts_shows_every_part(terminal):
    """The bar used to go for good at the end of the first: of `verify`, that of the checksums."""
    shown = terminal()
    with output.progress("verifying", unit="MB") as bar:
        for done, total in ((50, 200), (200, 200), (0, 300), (20, 300), (300, 300)):
            bar(done, total)
        assert "/200 MB" in shown.getvalue() and "/300 MB" in shown.getvalue()


def test_a_line_for_the_person_does_not_drive_the_terminal(terminal, tmp_path, capsys):
    config = {"model_type": "x\x1b]0;title\x07\x1b[2Jy"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = terminal()
    assert main(["info", str(tmp_path)]) == 2
    assert "not supported" in shown.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", shown.getvalue())


def test_no_control_characters_reach_a_terminal(terminal, monkeypatch):
    """What a model writes cannot drive the terminal; a pipe gets it as it is."""
    text = "a\x1b[31mb\tc\n\u6f22"
    shown = terminal()
    output.write(text)
    assert shown.getvalue() == "a[31mb\tc\n\u6f22"
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    output.write(text)
    assert sys.stdout.getvalue() == text


@pytest.mark.parametrize(
    ("environment", "unwanted"),
    [
        ({"TERM": "dumb"}, r"\x1b"),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, r"\x1b\[[\d;]*38;"),
    ],
    ids=["dumb", "NO_COLOR"],
)
def test_a_chat_sends_no_escapes_that_are_not_wanted(tiny_mlx, at_terminal, environment, unwanted):
    child = at_terminal("chat", tiny_mlx, "--max-tokens", "4", columns=40, **environment)
    child.expect("Ctrl-D ends")
    told = [child.before]
    child.send("hello\r")
    child.expect("prefilled")
    told.append(child.before)
    child.send("\x04")
    told.append(child.read())
    child.close()
    assert child.exitstatus == 0 and not re.search(unwanted, "".join(told))
