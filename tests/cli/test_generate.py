"""``mlx-kda generate``: sources of the prompt, output for people and programs, mistakes."""

import io
import json
import signal

import pytest
from helpers.hub import serving
from helpers.paths import EXAMPLES
from helpers.program import run

from mlx_kda.cli.main import main
from mlx_kda.context import Context
from mlx_kda.transcript import chat_ids

STATISTICS = {
    "prompt_tokens": int,
    "reused_tokens": int,
    "prefilled_tokens": int,
    "prompt_seconds": float,
    "prompt_tps": float,
    "generation_tokens": int,
    "generation_seconds": float,
    "generation_tps": float,
    "drafted_tokens": int,
    "accepted_tokens": int,
    "acceptance": type(None),
    "policy": str,
    "cache_bytes": int,
    "peak_memory": int,
    "peak_memory_source": str,
    "finish_reason": str,
}


@pytest.fixture
def generate(tiny_mlx, capsys):
    """Runs the command in this process; (status, stdout, stderr)."""

    def call(*argv):
        status = main(["generate", str(tiny_mlx), *argv])
        return (status, *capsys.readouterr())

    return call


def greedy(tiny_model, ids, count):
    """What the model says after ``ids``, by the model's own logits, read anew for every token."""
    model, _ = tiny_model
    said = []
    for _ in range(count):
        context = Context(model)
        context.prefill([*ids, *said])
        said.append(context.logits.argmax().item())
    return said


def test_json_has_text_tokens_and_statistics(generate, tiny_model):
    status, out, err = generate("--prompt", "hi", "--max-tokens", "7", "--ignore-eos", "--json")
    assert status == 0 and err == ""
    result = json.loads(out)
    ids = chat_ids(tiny_model[1], [{"role": "user", "content": "hi"}])
    assert result["prompt_tokens"] == ids
    assert result["tokens"] == greedy(tiny_model, ids, 7)
    statistics = result["statistics"]
    assert {name: type(value) for name, value in statistics.items()} == STATISTICS
    assert statistics["prompt_tokens"] == len(ids) and statistics["generation_tokens"] == 7
    assert statistics["finish_reason"] == "length"


def test_streamed_text_is_the_json_text(generate):
    flags = ["--prompt", "hi", "--max-tokens", "20", "--ignore-eos"]
    _, streamed, _ = generate(*flags)
    _, out, _ = generate(*flags, "--json")
    assert streamed == json.loads(out)["text"] + "\n"


def test_stats_go_to_standard_error(generate):
    status, out, err = generate("--prompt", "hi", "--max-tokens", "3", "--stats")
    assert status == 0 and "tokens/s" not in out
    for words in ("prompt: ", "answer: ", "peak memory: "):
        assert words in err


def test_raw_continues_the_prompt(generate, tiny_model):
    _, out, _ = generate("--prompt", "the rain", "--raw", "--max-tokens", "3", "--json")
    result = json.loads(out)
    assert result["prompt_tokens"] == list(tiny_model[1].encode("the rain"))


def test_system_message(generate, tiny_model):
    _, out, _ = generate("--prompt", "hi", "--system", "be brief", "--max-tokens", "0", "--json")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert json.loads(out)["prompt_tokens"] == chat_ids(tiny_model[1], messages)


def test_prompt_from_a_file_and_from_input(generate, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text("h\u00e9llo\n", encoding="utf-8")
    flags = ["--max-tokens", "0", "--json"]
    wanted = json.loads(generate("--prompt", "h\u00e9llo", *flags)[1])["prompt_tokens"]
    assert json.loads(generate("--prompt-file", str(file), *flags)[1])["prompt_tokens"] == wanted
    for source in (["--prompt", "-"], ["--prompt-file", "-"], []):
        monkeypatch.setattr("sys.stdin", io.StringIO("h\u00e9llo\n"))
        assert json.loads(generate(*source, *flags)[1])["prompt_tokens"] == wanted


def test_sampling_flags(generate):
    flags = ["--prompt", "hi", "--max-tokens", "12", "--ignore-eos", "--json", "--temp", "1"]
    more = ["--top-p", "0.95", "--top-k", "100", "--min-p", "0.01", "--repetition-penalty", "1.1"]

    def tokens(*extra):
        return json.loads(generate(*flags, *extra)[1])["tokens"]

    assert tokens("--seed", "5", *more) == tokens("--seed", "5", *more)
    assert tokens("--seed", "5") != tokens("--seed", "6")
    # the largest k leaves every token in, as no k does
    assert tokens("--seed", "5", "--top-k", "100000") == tokens("--seed", "5")
    assert tokens("--seed", "5", "--top-k", "1") == tokens("--temp", "0")


def test_the_program_reads_a_pipe(tiny_mlx):
    result = run("generate", str(tiny_mlx), "--max-tokens", "4", "--json", stdin="hi\n")
    assert result.returncode == 0 and len(json.loads(result.stdout)["tokens"]) <= 4


def tokens_of(out):
    return json.loads(out)["tokens"]


RAW = ["--raw", "--ignore-eos", "--json"]


def test_a_session_continues_where_it_stopped(generate, tmp_path):
    file = str(tmp_path / "s")
    whole = tokens_of(generate("--prompt", "the rain", "--max-tokens", "20", *RAW)[1])
    first = generate("--prompt", "the rain", "--max-tokens", "8", "--session", file, *RAW)
    # a prompt that the session begins with is not read again
    again = generate("--prompt", "the rain", "--max-tokens", "5", "--session", file, *RAW)
    assert json.loads(again[1])["statistics"]["prefilled_tokens"] == 0
    parts = tokens_of(first[1]) + tokens_of(again[1])
    assert parts == whole[:13]
    # another text is added
    _, out, _ = generate("--prompt", " in the plain", "--max-tokens", "0", "--session", file, *RAW)
    statistics = json.loads(out)["statistics"]
    assert statistics["reused_tokens"] > 13 and statistics["prefilled_tokens"] > 0


def test_a_session_of_messages(generate, tmp_path, monkeypatch):
    file = str(tmp_path / "s")
    flags = ["--max-tokens", "6", "--ignore-eos", "--json", "--session", file]
    first = json.loads(generate("--prompt", "hello", *flags)[1])
    second = json.loads(generate("--prompt", "more", *flags)[1])
    assert second["statistics"]["reused_tokens"] == len(first["prompt_tokens"]) + 6
    assert second["prompt_tokens"][: len(first["prompt_tokens"])] == first["prompt_tokens"]
    # with an empty pipe the answer itself continues
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    third = json.loads(generate(*flags)[1])
    long = ["--max-tokens", "12", "--ignore-eos", "--json"]
    other = str(tmp_path / "t")
    generate("--prompt", "hello", *flags[:4], "--session", other)
    wanted = json.loads(generate("--prompt", "more", *long, "--session", other)[1])
    assert second["tokens"] + third["tokens"] == wanted["tokens"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_session(generate, tmp_path, monkeypatch, signal_after, sent):
    file = tmp_path / "s"
    flags = ["--prompt", "the rain", *RAW[:2], "--session", str(file)]
    whole = tokens_of(generate(*flags[:2], *RAW, "--max-tokens", "30")[1])
    signal_after(10, sent)
    status, _, err = generate(*flags, "--max-tokens", "30")
    monkeypatch.undo()
    assert status == 128 + sent and f"interrupted; the session is saved in {file}" in err
    rest = tokens_of(generate(*flags, "--max-tokens", "20", "--json")[1])
    assert rest == whole[10:]


@pytest.mark.parametrize("raw", [True, False])
def test_a_signal_while_reading_keeps_what_was_read(generate, tmp_path, monkeypatch, raw):
    """A long prompt, stopped half way: the same command reads only the rest."""
    flags = ["--prompt", "the rain in the plain " * 8, "--json", "--max-tokens", "6"]
    flags += ["--ignore-eos", *(["--raw"] if raw else [])]
    wanted = json.loads(generate(*flags)[1])
    flags += ["--session", str(tmp_path / "s"), "--prefill-step", "16"]
    absorb = Context._absorb

    def slow(self, chunk, last):
        absorb(self, chunk, last)
        if len(self.tokens) == 48:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Context, "_absorb", slow)
        assert generate(*flags)[0] == 128 + signal.SIGINT
    result = json.loads(generate(*flags)[1])
    assert result["statistics"]["reused_tokens"] == 48
    assert result["tokens"] == wanted["tokens"]


def test_a_failure_leaves_the_old_session(generate, tmp_path):
    file = tmp_path / "s"
    flags = ["--session", str(file), "--raw", "--max-tokens", "3"]
    assert generate("--prompt", "the rain", *flags)[0] == 0
    before = file.read_bytes()
    status, out, err = generate("--prompt", "z" * 600, *flags)
    assert status == 2 and "longer than the model's context" in err and out == ""
    assert file.read_bytes() == before
    assert generate("--prompt", "x", *flags, "--policy", "int8")[0] == 2
    file.write_bytes(before[:-1])
    status, _, err = generate("--prompt", "x", *flags)
    assert status == 2 and "truncated" in err and file.read_bytes() == before[:-1]


def test_a_policy_is_in_force_and_reported(generate):
    flags = ["--prompt", "the rain in the plain", "--max-tokens", "5", "--policy"]
    status, out, _ = generate(*flags, "window:8+2,int8", "--json")
    result = json.loads(out)
    assert status == 0 and result["statistics"]["policy"] == "window:8+2,int8"
    kda, *_, mla = result["cache"]
    assert kda["kind"] == "kda" and mla["asked"] == "window:8+2,int8"
    assert mla["now"] == mla["bytes_at_end"] == mla["fixed_bytes"] and mla["token_bytes"] == 0
    assert result["statistics"]["cache_bytes"] == sum(one["now"] for one in result["cache"])
    _, _, err = generate(*flags, "int4", "--stats")
    assert "policy int4" in err and "latents in 4 bits" in err
    with pytest.raises(SystemExit, match="2"):
        generate(*flags, "window:0")


def test_speculation_says_the_same(generate):
    flags = ["--prompt", "the rain " * 9, "--max-tokens", "40", "--ignore-eos", "--json"]
    plain, guessed = (json.loads(generate(*flags, *more)[1]) for more in ([], ["--speculate"]))
    assert plain["tokens"] == guessed["tokens"]
    assert plain["statistics"]["drafted_tokens"] == 0
    assert 0 <= guessed["statistics"]["accepted_tokens"] <= guessed["statistics"]["drafted_tokens"]


def test_what_cannot_fit_is_refused_with_numbers(generate, monkeypatch):
    from mlx_kda import memory_plan

    monkeypatch.setattr(
        memory_plan, "machine", lambda: memory_plan.MachineMemory(10**7, 10**7, "physical memory")
    )
    status, out, err = generate("--prompt", "hi", "--max-tokens", "3")
    assert status == 2 and out == "" and err.count("\n") == 1
    for words in ("tokens under exact need", "weights 1", "this machine has 10 MB", "--force"):
        assert words in err
    assert generate("--prompt", "hi", "--max-tokens", "3", "--force")[0] == 0


FLA = str(EXAMPLES / "tiny-fla-kda")
NOTHING = "changes nothing here: this model has KDA layers only"


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", FLA, "--context", "64", "--policy", "{}"],
        ["info", FLA, "--context", "64", "--policy", "{}"],
        ["generate", FLA, "--prompt", "hi", "--max-tokens", "0", "--policy", "{}"],
        ["chat", FLA, "--policy", "{}"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_policy_on_a_pure_kda_model_is_said_to_change_nothing(argv, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for policy, told in (("int8", 1), ("window:8+2", 1), ("exact", 0)):
        assert main([word.format(policy) for word in argv]) == 0
        assert capsys.readouterr().err.count(NOTHING) == told


def test_a_hub_id_is_planned_by_its_headers_and_then_run(tiny_hf, tmp_path, monkeypatch, capsys):
    """The help says folder or hub id; it used to end with "no such folder"."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    with serving() as hub:
        hub.folders["owner/model"] = tiny_hf
        client = huggingface_hub.HfApi(endpoint=hub.endpoint, token="hf_nothing")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr("mlx_kda.weights.hub.api", lambda: client)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        assert main(["plan", "owner/model", "--context", "64", "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert not any((tmp_path / "cache").rglob("*.safetensors"))
        flags = ["--prompt", "hi", "--max-tokens", "3", "--json"]
        assert main(["generate", "owner/model", *flags]) == 0
        there = json.loads(capsys.readouterr().out)
    assert main(["generate", str(tiny_hf), *flags]) == 0
    assert there["tokens"] == json.loads(capsys.readouterr().out)["tokens"]
    assert main(["plan", str(tiny_hf), "--context", "64", "--json"]) == 0
    assert planned["policies"] == json.loads(capsys.readouterr().out)["policies"]


def test_a_prompt_too_long_is_told_before_the_weights_are_read(generate, monkeypatch):

    def read(folder):
        raise AssertionError("the weights were read")

    monkeypatch.setattr("mlx_kda.cli.loading.load_model", read)
    status, out, err = generate("--prompt", "z" * 600)
    assert status == 2 and out == "" and "600 tokens is longer than the model's context" in err
