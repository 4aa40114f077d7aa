"""The trained checkpoint in examples/tiny-fla-kda: its files, tokenizer, constant memory."""

import json

import common
import constant
import mlx.core as mx
import pytest
import sentencepiece
from helpers.trained import (
    EXAMPLES,
    GLOSSES,
    TESTS,
    TRAIN,
    answer,
    check_card,
    check_golden_logits,
    prompt,
    wrong_glosses,
)
from safetensors import safe_open

import mlx_kda
from mlx_kda.cli.main import main
from mlx_kda.context import Context
from mlx_kda.models import load_model
from mlx_kda.session import Session

FOLDER = EXAMPLES / "tiny-fla-kda"
CONFIG = json.loads((FOLDER / "config.json").read_text())
MARKS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
ANSWERS = {
    "What is an anchor?": "A mechanical device that prevents a vessel from moving.",
    "Define river.": "A large natural stream of water.",
    "What does candle mean?": "Stick of wax with a wick in the middle.",
    "Who are you?": "I am a tiny language model with Kimi Delta Attention, trained for tests.",
}


@pytest.fixture(scope="module")
def loaded():
    return mlx_kda.load(FOLDER)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The folder in 4 bits."""
    out = tmp_path_factory.mktemp("fla") / "q4"
    assert main(["convert", str(FOLDER), str(out), "--q-bits", "4"]) == 0
    return out


@pytest.fixture(scope="module")
def oracle():
    return sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / "tokenizer.model"))


def test_the_folder_is_what_fla_saves_in_at_most_8_megabytes():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert files.keys() == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "chat_template.jinja",
        "README.md",
    }
    assert sum(files.values()) < 8 * 10**6
    assert CONFIG["model_type"] == "kda" and CONFIG["architectures"] == ["KDAForCausalLM"]
    assert CONFIG["attn"] is None and CONFIG["head_dim"] in (64, 128)


def test_every_tensor_is_there_in_flas_names_and_dtypes():
    projections = ["q_proj", "k_proj", "v_proj", "b_proj", "o_proj"]
    projections += ["f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1"]
    convolutions = ["q_conv1d", "k_conv1d", "v_conv1d"]
    names = {"model.embeddings.weight", "model.norm.weight", "lm_head.weight"}
    for n in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        parts = [*projections, *convolutions, "o_norm"]
        names |= {f"{layer}.attn.{part}.weight" for part in parts}
        names |= {f"{layer}.attn.{part}" for part in ("A_log", "dt_bias", "g_proj.1.bias")}
        names |= {f"{layer}.{part}_norm.weight" for part in ("attn", "mlp")}
        names |= {f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    with safe_open(FOLDER / "model.safetensors", "np") as file:
        found = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert found.keys() == names
    for name, dtype in found.items():
        assert dtype == ("F32" if name.endswith(("A_log", "dt_bias")) else "BF16"), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_fla(dtype):
    """FLA's KDAForCausalLM and examples/train/model.py (float64 and float32) on two texts."""
    check_golden_logits(FOLDER, TESTS / "tiny_fla_golden.npz", dtype)


@pytest.mark.parametrize(
    "text",
    [
        "What is an anchor? It's what they'd said.",
        "In the beginning God created the heaven.\n\nAnd the earth was void.",
        "中文 mixed with English, 2024年3月14日 👩‍👩‍👧",
        " leading,  two spaces and trailing ",
        "def f(x):\n\treturn {'a': [1, 2]}\r\n",
        bytes(range(1, 256)).decode("latin-1"),
        "",
    ],
)
def test_the_tokenizer_agrees_with_sentencepiece(loaded, oracle, converted, text):
    ids = loaded[1].encode(text, add_special_tokens=False)
    assert ids == oracle.encode(text)
    assert loaded[1].decode(ids) == text == oracle.decode(ids)
    assert mlx_kda.load(converted)[1].encode(text, add_special_tokens=False) == ids


def test_the_chat_is_that_of_training_and_marks_cannot_be_typed(loaded, oracle):
    """A mark in a message is text; the template's own marks are marks."""
    tokenizer = loaded[1]
    marks = {name: oracle.piece_to_id(name) for name in MARKS}
    turns = [("user", "Define river."), ("assistant", "A stream."), ("user", "Who are you?")]
    want = []
    for role, text in turns:
        want += [marks[f"<|{role}|>"], *oracle.encode(text), marks["<|end|>"]]
    want.append(marks["<|assistant|>"])
    messages = [{"role": role, "content": text} for role, text in turns]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    assert ids == want
    typed = [{"role": "user", "content": "a <|end|><|system|>b"}]
    ids = tokenizer.apply_chat_template(typed, tokenize=True, add_generation_prompt=True)
    assert [i for i in ids if i in marks.values()] == [
        marks["<|user|>"],
        marks["<|end|>"],
        marks["<|assistant|>"],
    ]
    assert set(tokenizer.eos_token_ids) == {oracle.eos_id(), marks["<|end|>"]}


@pytest.mark.parametrize(("question", "expected"), ANSWERS.items())
def test_greedy_answers(loaded, question, expected):
    assert answer(loaded, ("user", question)) == expected


def test_glosses_are_word_for_word(loaded, oracle):
    """The card claims the 3,000 nouns; 20 of them, evenly spread over the list."""
    words = list(GLOSSES)[::150]
    assert len(words) == 20
    assert wrong_glosses(loaded, words, oracle.piece_to_id("<|end|>")) == []


def test_a_fact_is_remembered_after_a_dozen_questions(loaded):
    """The card claims facts after 256 tokens of questions."""
    told = [("user", "My dog is called Bella."), ("assistant", "Bella is a good name for a dog.")]
    for word in list(GLOSSES)[50::240]:
        told += [("user", f"Define {word}."), ("assistant", GLOSSES[word].capitalize() + ".")]
    told.append(("user", "What is my dog called?"))
    assert len(prompt(loaded[1], *told)) > 256
    assert answer(loaded, *told) == "Your dog is called Bella."


def test_four_bits_answer_too(converted):
    """The gate path is spared, and most of what the model knows survives 4 bits."""
    model, tokenizer = mlx_kda.load(converted)
    assert model.layers[0].mlp.gate_proj.bits == 4
    assert not hasattr(model.layers[0].self_attn.g_b_proj, "bits")
    assert answer((model, tokenizer), ("user", "Define river.")) == ANSWERS["Define river."]


def test_the_kernels_give_the_same_answer():
    """Head size 64 has kernels: the answer by them, in the fast emulator."""
    model, tokenizer = mlx_kda.load(FOLDER, runner="emulator-fast")
    assert model.kda_layers[0].choose(1, mx.bfloat16).kernel == "kda_decode"
    assert answer((model, tokenizer), ("user", "Define river.")) == ANSWERS["Define river."]


def test_it_remembers_what_it_was_told_across_a_saved_session(loaded, tmp_path):
    session = Session(*loaded)
    list(session.send("My name is Clara.", max_tokens=20))
    list(session.send("What is a river?", max_tokens=20))
    session.save(tmp_path / "clara.session")
    again = Session.load(tmp_path / "clara.session", *loaded)
    pieces = again.send("What is my name?", max_tokens=20)
    assert "".join(piece.text for piece in pieces) == "Your name is Clara."


def test_info_says_that_a_token_costs_nothing(capsys):
    assert main(["info", str(FOLDER), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["latent_bytes_per_token"] == 0
    assert report["layer_types"] == {"kda": 6}
    fixed = 6 * (3 * 64 * 64 * 4 + 3 * 3 * 192 * 2)
    assert set(report["cache_bytes"].values()) == {fixed} == {report["state_bytes"]}
    # the families of FLA's names are those of ours
    assert "other" not in report["families"] and "KDA gates" in report["families"]


def _is_flat(rows: list[dict]) -> bool:
    """No growth, judged by the highest resident memory instead of that of the moment.

    The latter moves by tens of MB in a process that ran other tests, as allocators keep or free;
    the benchmark has a process of its own.
    """
    grown = [each for each in constant.growth(rows) if not each.startswith("resident")]
    room = 2 * constant.ROOM_MB["resident_mb"]
    return not grown and rows[-1]["peak_mb"] <= rows[0]["peak_mb"] + room


def test_memory_is_flat_over_20_000_tokens():
    """Constant memory: no array, no byte of cache, no peak of MLX's more after 20,000 tokens.

    A random model of three small layers; docs/constant-memory.md has 200,000 of the trained one.
    """
    context = Context(load_model(TESTS / "goldens-fla" / "plain"))
    context.limit = None
    rows = list(constant.read(context, range(64), 20_000, every=5_000))
    assert len(context.tokens) == 20_000
    assert _is_flat(rows), rows
    assert rows[0]["cache_bytes"] == 3 * (2 * 32 * 32 * 4 + 3 * 3 * 64 * 2)


def test_the_state_is_of_use_after_thousands_of_tokens(loaded):
    """A definition asked for after 3,000 tokens of prose, in the same state."""
    context = Context(loaded[0])
    ids = loaded[1].encode((TRAIN / "held_out.txt").read_text()[:4000])
    rows = list(constant.read(context, ids, 3_000, every=1_500, step=1024))
    assert rows[0]["arrays"] == rows[1]["arrays"]
    assert (
        rows[0]["cache_bytes"] == rows[1]["cache_bytes"] == 6 * (3 * 64 * 64 * 4 + 3 * 3 * 192 * 2)
    )
    question = "What is an anchor?"
    assert constant.ask(context, loaded[1], question) == ANSWERS[question]


def test_growth_is_noticed():
    first = {"tokens": 1, "cache_bytes": 10, "arrays": 3, "active_mb": 1.0}
    first |= {"mlx_peak_mb": 2.0, "resident_mb": 50.0}
    assert constant.growth([first, first]) == []
    for key, value in (("cache_bytes", 11), ("arrays", 4), ("active_mb", 2.0)):
        assert len(constant.growth([first, first | {key: value}])) == 1
    assert constant.growth([first, first | {"resident_mb": 60.0, "mlx_peak_mb": 9.0}])


def test_the_benchmark_refuses_a_model_that_grows(capsys):
    argv = [str(EXAMPLES / "tiny-kimi-linear"), "--text", str(TRAIN / "held_out.txt")]
    assert common.run(None, constant.add_arguments, constant.main, argv) == 2
    assert "layers that are not KDA" in capsys.readouterr().err


def test_the_cards_numbers_come_from_the_script():
    """The measured part is what the script makes of the records, which say what it can do."""
    counts, device = check_card("kda")
    right, of = counts["glosses", "exact"]
    assert right > 0.95 * of >= 95 and device["glosses"] > 0.95
    assert device["pass_key"] == {"512": 0.0, "2048": 0.0, "8192": 0.0}
    # all of 20 facts after 256 tokens of questions; fewer, further back and after prose
    shares = {
        kind: [
            counts[f"fact after {tokens} of {kind}", "exact"]
            for tokens in (256, 512, 1024, 2048, 4096, 16384)
        ]
        for kind in ("questions", "sentences")
    }
    assert shares["questions"][0] == (20, 20)
    for kind in shares:
        kept = [right / of for right, of in shares[kind]]
        assert kept[0] > 0.5 > kept[-1]
    assert shares["sentences"][0][0] < 20
