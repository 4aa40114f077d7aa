"""Simple mistakes are told in one line before anything heavy is imported."""

import argparse
import json
import subprocess
import sys

import pytest

from mlx_kda.cli import options
from mlx_kda.cli.convert import byte_size
from mlx_kda.cli.main import COMMANDS, build_parser, main

# Runs commands one after the other and reports what each told and what was imported by then.
RUN = """
import contextlib, io, json, sys
from mlx_kda.cli.main import main
HEAVY = {"mlx", "mlx_lm", "transformers", "numpy", "tokenizers", "torch", "rich", "mlx_kda.bench"}
sys.stdin = io.StringIO("")
for argv in json.loads(sys.argv[1]):
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(argv)
        except SystemExit as stop:
            status = stop.code
    print(json.dumps([status, told.getvalue().splitlines(), sorted(HEAVY & set(sys.modules))]))
"""


def attempt(*argvs, cwd=None):
    """For each command line (status, what it told, heavy modules imported by then)."""
    command = [sys.executable, "-c", RUN, json.dumps(argvs)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a checkpoint's outside and with what is none."""
    from helpers.tiny import tiny_config

    here = tmp_path_factory.mktemp("mistakes")

    def folder(name, config, weights=True):
        (here / name).mkdir()
        (here / name / "config.json").write_text(config)
        if weights:
            (here / name / "model.safetensors").write_bytes(b"")

    good = tiny_config()
    folder("model", json.dumps(good))
    folder("other", json.dumps({**good, "model_type": "llama"}))
    folder("rotary", json.dumps({**good, "mla_use_nope": False}))
    folder("damaged", "{")
    folder("list", "[]")
    folder("weightless", json.dumps(good), weights=False)
    folder("untyped", "{}")
    (here / "empty").mkdir()
    (here / "a" / "begun.partial").mkdir(parents=True)
    (here / "begun.partial").mkdir()
    (here / "llama").mkdir()
    for path in (here / "llama.gguf", here / "llama" / "q4.gguf"):
        path.write_bytes(b"GGUF\x03\x00\x00\x00")
    (here / "latin1.txt").write_bytes("caf\xe9".encode("latin1"))
    (here / "empty.txt").write_text("")
    (here / "blank.txt").write_text("  \n \n")
    (here / "notes.txt").write_text("these are no session and no model\n")
    (here / "short.session").write_bytes((500).to_bytes(8, "little") + b"{")
    return here


MODELS = {
    "nowhere": "nowhere: no such folder",
    "./no/where": "no such folder",
    "notes.txt": "notes.txt is a file",
    "": "name",  # of a variable that is not set; it was the current folder
    "llama.gguf": "llama.gguf is a GGUF file, which is not read: give a folder in Hugging Face's",
    "llama": "llama holds a GGUF model, which is not read: give a folder in Hugging Face's",
    "https://huggingface.co/owner/model/tree/main": "is an address: give the hub id owner/model",
    "hf://owner/model": "give the hub id owner/model",
    "untyped": "config.json: no model_type; supported: kimi_linear, kda",
    "empty": "empty is not a checkpoint: it has no config.json",
    "damaged": "is damaged",
    "list": "not a JSON object",
    "other": "model_type 'llama' is not supported; supported: kimi_linear, kda",
    "weightless": "has no .safetensors file",
    "rotary": "mla_use_nope=False (rotary MLA) is not supported",
}
TAKES_MODEL = {
    "generate": ["--prompt", "x"],
    "chat": [],
    "plan": [],
    "doctor": [],
    "demo": [],
    "info": [],
}


def test_a_wrong_model_is_told_at_once(here):
    tried = [
        (command, model)
        for command in TAKES_MODEL
        for model in MODELS
        # info describes what cannot run
        if (command, model) not in (("info", "weightless"), ("info", "rotary"))
    ]
    argvs = [[command, model, *TAKES_MODEL[command]] for command, model in tried]
    for argv, (status, told, heavy) in zip(argvs, attempt(*argvs, cwd=here), strict=True):
        assert status == 2 and len(told) == 1 and MODELS[argv[1]] in told[0], (argv, told)
        assert heavy == [], argv


MISTAKES = [
    (["generate", "model", "--prompt", ""], "the prompt is empty"),
    (["generate", "model", "--prompt-file", "empty.txt"], "the prompt is empty"),
    (["generate", "model", "--prompt", " \n\t "], "the prompt is empty"),
    (["generate", "model", "--prompt", "-"], "the prompt is empty"),
    (["generate", "model"], "no prompt: give --prompt TEXT, --prompt-file FILE or text on a pipe"),
    (["generate", "model", "--prompt-file", ""], "--prompt-file: the name is empty"),
    (["generate", "model", "--prompt", "x", "--session", ""], "--session: the name is empty"),
    (
        ["generate", "model", "hi"],
        "unrecognized arguments: hi; a prompt is given with --prompt (see",
    ),
    (["generate", "model", "--temperature", "1"], "--temperature 1; did you mean --temp? (see"),
    (["convert", "model", "out", "--q_bits=4"], "--q_bits=4; did you mean --q-bits?"),
    (["convert", "model", "out", "-q"], "unrecognized arguments: -q (see mlx-kda convert --help)"),
    (["bench", "op", "--token", "1"], "mlx-kda bench op: unrecognized arguments: --token 1; did"),
    (
        ["--debag", "info", "model"],
        "unrecognized arguments: --debag; did you mean --debug?",
    ),
    (["chat", "model", "--resume", ""], "--resume: the name is empty"),
    (["generate", "model", "--prompt-file", "latin1.txt"], "latin1.txt is not UTF-8 text"),
    (["generate", "model", "--prompt-file", "none.txt"], "cannot read none.txt"),
    (["generate", "model", "--prompt-file", "empty"], "cannot read empty"),
    (["generate", "model", "--prompt", "x", "--raw", "--system", "y"], "--system needs"),
    (["generate", "model", "--prompt", "x", "--session", "no/s"], "no does not exist"),
    (["generate", "model", "--prompt", "x", "--session", "empty"], "empty is a folder"),
    (["generate", "model", "--prompt", "x", "--session", "notes.txt"], "not an mlx-kda session"),
    (["generate", "model", "--prompt", "x", "--session", "short.session"], "truncated"),
    (["chat", "model", "--resume", "none"], "none cannot be read"),
    (["chat", "model", "--resume", "notes.txt"], "not an mlx-kda session"),
    (["chat", "model", "--session", "no/s"], "no does not exist"),
    (["plan", "model", "--context", "2000000"], "context of 1,048,576: lower --context"),
    (
        ["plan", "model", "--context", "128K"],
        "'128K' is not a whole number between 1 and 1,000,",
    ),
    (["convert", "nowhere", "out"], "nowhere: no such folder"),
    (["convert", "empty", "out"], "it has no config.json"),
    (["convert", "llama.gguf", "out"], "is a GGUF file"),
    (["convert", "", "out"], "the name of the checkpoint is empty"),
    (["convert", "model", ""], "OUT: the name is empty"),
    (["convert", "model", "out", "--q-group-size", "48"], "'48' is not one of 16, 32, 64, 128"),
    (["chat", "begun"], "begun.partial beside it holds an unfinished conversion"),
    (["generate", "a/begun", "--prompt", "x"], "begun.partial beside it holds an unfinished"),
    (["verify", ""], "the name of the converted folder is empty"),
    (["verify", "model", "--source", ""], "the name of the checkpoint is empty"),
    (["verify", "model", "--tokens", "notes.txt"], "--tokens needs --source"),
    (["bench", "all", "--report", ""], "--report: the name is empty"),
    (["verify", "nowhere"], "nowhere is not a converted model"),
    (["verify", "model", "--source", "nowhere"], "nowhere: no such folder"),
    (["bench", "model", "nowhere"], "nowhere: no such folder"),
    (["bench", "op", "--row", "odd"], "invalid choice: 'odd'"),
    (["bench", "dance"], "invalid choice: 'dance'"),
    (["chat", "model", "--policy", "most"], "'most' is not one of: exact, window:N"),
    (["plan", "model", "--policy", "window:0"], "a window holds at least 1 token"),
    (["doctor", "--runner", "abacus"], "invalid choice: 'abacus'"),
    (["convert", "model", "out", "--dtype", "int8"], "invalid choice: 'int8'"),
    (["frobnicate"], "invalid choice: 'frobnicate'"),
    ([], "the following arguments are required: COMMAND"),
    (["convert", "only-a-source"], "required: OUT"),
    (["convert", "a", "b", "--q-bit", "4"], "did you mean --q-bits?"),  # no abbreviations
    (["generate", "m", "--prompt", "x", "--prompt-file", "y"], "not allowed with"),
    (["chat", "m", "another"], "unrecognized arguments: another"),
]


def test_a_simple_mistake_is_told_at_once(here):
    argvs = [argv for argv, _ in MISTAKES]
    found = attempt(*argvs, cwd=here)
    for (argv, words), (status, told, heavy) in zip(MISTAKES, found, strict=True):
        assert status == 2 and len(told) == 1 and words in told[0], (argv, told)
        assert heavy == [], argv


WRONG = ["nan", "inf", "-1", "1e12", "x", "", "9" * 5000, "1" + "0" * 300 + ".5"]
TYPES = {
    "int": (options.number(int, 0, options.LARGEST), [*WRONG, "1.5"]),
    "float": (options.number(float, 0, 1), [*WRONG, "2"]),
    "numbers": (options.numbers, [*WRONG, "0", "1,,2", "1,x"]),
    "one of": (options.one_of(2, 4), [*WRONG, "3"]),
    "bytes": (byte_size, ["nan", "inf", "-1", "0", "x", "5X", "9" * 400 + "G"]),
}


@pytest.mark.parametrize("kind", TYPES)
def test_values_of_a_wrong_kind_or_size_are_refused(kind):
    parse, values = TYPES[kind]
    for value in values:
        with pytest.raises(argparse.ArgumentTypeError, match="is not "):
            parse(value)


BOUNDS = {
    ("chat", "--max-tokens"): ("0", 10**9),
    ("chat", "--temp"): ("1e-300", 100),
    ("chat", "--top-p"): (0, 1),
    ("chat", "--top-k"): (0, 10**9),
    ("chat", "--min-p"): (0, 1),
    ("chat", "--repetition-penalty"): (0.1, 10),
    ("chat", "--seed"): (0, 2**64 - 1),
    ("chat", "--prefill-step"): (1, 10**9),
    ("plan", "m", "--context"): (1, 10**9),
    ("doctor", "--heads"): (1, 1024),
    ("demo", "--tokens"): (64, None),
    ("demo", "--max-tokens"): (1, None),
    ("demo", "--q-bits"): (2, 8),
    ("verify", "m", "--max-tokens"): (2, None),
    ("verify", "m", "--max-kl"): (0, None),
    ("verify", "m", "--min-top1"): (0, 1),
    ("convert", "a", "b", "--q-bits"): (2, 8),
    ("convert", "a", "b", "--q-group-size"): (16, 128),
    ("convert", "a", "b", "--target-bpw"): (2, 16),
    ("bench", "op", "--budget"): (0.1, None),
    ("bench", "op", "--samples"): (3, None),
    ("bench", "op", "--dim"): (1, None),
}


@pytest.mark.parametrize("argv", BOUNDS, ids=" ".join)
def test_options_have_bounds(argv, capsys):
    """The ends of a range are accepted; what lies beyond is refused in one line that names it."""
    parser, (*words, option) = build_parser(), argv
    for end, beyond in zip(BOUNDS[argv], (-1, 2 * (BOUNDS[argv][1] or 0)), strict=True):
        if end is None:
            continue
        args = parser.parse_args([*words, f"{option}={end}"])
        value = getattr(args, option[2:].replace("-", "_"))
        assert value == type(value)(end)
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args([*words, f"{option}={beyond}"])
        err = capsys.readouterr().err
        assert option in err and err.count("\n") == 1 and len(err) < 300


def test_a_size_may_have_a_unit():
    sizes = {"500M": 5 * 10**8, "1.5gb": 15 * 10**8, "2T": 2 * 10**12, "7": 7}
    assert {text: byte_size(text) for text in sizes} == sizes


def test_a_blank_raw_prompt_is_accepted(tiny_mlx, capsys):
    """White space is no message, but a text can begin with it."""
    flags = ["generate", str(tiny_mlx), "--prompt", "  ", "--max-tokens", "1"]
    assert main([*flags, "--raw"]) == 0
    assert main(flags) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_a_hub_that_cannot_be_asked_is_no_riddle(tmp_path, monkeypatch, capsys):
    """The name may have been meant as a folder, so both are named."""
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise OSError("Got: ConnectError: [Errno -2] Name or service not known\nCheck it.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.chdir(tmp_path)
    for argv in (["plan"], ["doctor"], ["convert", "out"], ["generate", "--prompt", "x"], ["chat"]):
        assert main([argv[0], "models/kimi", *argv[1:]]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err == (
            "mlx-kda: models/kimi is not a local folder, and the Hugging Face hub failed: "
            "ConnectError: [Errno -2] Name or service not known\n"
        )


@pytest.mark.parametrize("runner", ["metal", "cuda"])
def test_a_gpu_that_is_not_here_is_told_first(runner, monkeypatch, capsys):
    import mlx.core as mx

    monkeypatch.setattr(getattr(mx, runner), "is_available", lambda: False)
    for flags in ([], ["--json"]):
        assert main(["doctor", "--runner", runner, *flags]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"mlx-kda: --runner {runner} needs ")
        assert "--runner emulator-fast runs" in err and err.count("\n") == 1


def test_an_argument_that_is_no_utf8_is_one_line(capfd):
    done = subprocess.run(
        [sys.executable, "-m", "mlx_kda", "generate", "m", b"--prompt=caf\xe9"], capture_output=True
    )
    assert (
        done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"not UTF-8 text" in done.stderr
    )


def test_help_and_version_import_nothing_heavy():
    argvs = [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)]
    assert attempt(*argvs) == [[0, [], []]] * len(argvs)


@pytest.mark.parametrize("command", [["info"], ["plan", "--context", "64"], ["verify"]])
def test_what_runs_no_model_needs_no_transformers(tiny_mlx, command):
    """A second or more of imports, which mlx-lm brings along."""
    ((status, told, heavy),) = attempt([command[0], str(tiny_mlx), *command[1:]])
    assert status == 0 and told == []
    assert not {"mlx_lm", "transformers"} & set(heavy)
