"""What few bits leave of the trained checkpoint: golden answers, perplexity, and the gate path."""

import itertools
import json
import math

import common
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import quality
from helpers.trained import EXAMPLES, TRAIN, train_script
from quality_recipes import FAMILIES, GATE_PATH, family_paths

import mlx_kda
from mlx_kda import demo
from mlx_kda.convert import convert
from mlx_kda.errors import UserError
from mlx_kda.session import Session

TINY = EXAMPLES / "tiny-kimi-linear"
# The beginning of the Book of Ruth, which the checkpoint never saw: 330 tokens to predict.
TEXT = (TRAIN / "held_out.txt").read_text(encoding="utf-8")[:1200]
KING = "A male sovereign; ruler of a kingdom."


def load_float32(folder):
    model, tokenizer = mlx_kda.load(folder)
    quality.widen(model)
    return model, tokenizer


@pytest.mark.parametrize(
    "options",
    [{}, {"q_bits": 8}, {"q_bits": 6}, {"q_bits": 4}, {"q_bits": 4, "q_mode": "mxfp4"}],
    ids=["source", "8", "6", "4", "mxfp4"],
)
def test_a_gloss_survives_the_bits(tmp_path, options):
    convert(TINY, tmp_path / "out", **options)
    pieces = Session(*load_float32(tmp_path / "out")).send("What is a king?", max_tokens=30)
    assert "".join(piece.text for piece in pieces) == KING


# Up to where the best two tokens of the model come close.
@pytest.mark.parametrize(
    ("bits", "text", "golden"),
    [
        (None, "In the beginning", " of the year.\n"),
        (None, demo.OPENING, " heareth, and heareth"),
        (4, demo.OPENING, " heareth, and heareth the soul of the wicked"),
        (4, "And the LORD said unto Moses,", " Say unto the children of Israel"),
    ],
)
def test_golden_continuations_of_the_source_and_of_the_demos_model(tmp_path, bits, text, golden):
    folder = TINY
    if bits:
        folder = tmp_path / "out"
        convert(TINY, folder, q_bits=bits, dtype="float32")
    model, tokenizer = load_float32(folder)
    session = Session(model, tokenizer)
    session.prefill(text)
    count = len(tokenizer.encode(golden, add_special_tokens=False))
    assert "".join(piece.text for piece in session.generate(count)) == golden


@pytest.fixture(scope="module")
def rows():
    """Rows of the recipes on the short text; the page has those of all of it."""
    names = ("source", "q3", "q3+gates", "q2", "q2+gates")
    return {row["recipe"]: row for row in quality.rows(TINY, TEXT, names)}


@pytest.mark.parametrize("bits", [3, 2])
def test_the_default_recipe_is_better_than_one_that_quantises_the_gate_path(rows, bits):
    """At the same bits; docs/quality.md says how much it is, and what 4 bits show."""
    kept, quantised = rows[f"q{bits}"], rows[f"q{bits}+gates"]
    assert kept["perplexity"] < quantised["perplexity"]
    assert kept["divergence"] < quantised["divergence"]
    assert kept["bits_per_weight"] > quantised["bits_per_weight"]
    rise = quantised["divergence"] - kept["divergence"]
    assert quantised["gates_divergence"] == pytest.approx(rise)


def test_fewer_bits_are_worse(rows):
    assert rows["source"]["divergence"] == 0
    divergence = [rows[name]["divergence"] for name in ("source", "q3", "q2")]
    assert divergence == sorted(divergence) and divergence[1] > 0.1
    perplexity = [rows[name]["perplexity"] for name in ("source", "q3", "q2")]
    assert perplexity == sorted(perplexity)


class Fixed(nn.Module):
    """A model of three tokens whose predictions depend on the last token alone."""

    def __init__(self, logits):
        super().__init__()
        self.table = mx.array(logits)
        self.seen = []

    def make_cache(self):
        return []

    def __call__(self, tokens, cache):
        self.seen.append(tokens.shape[1])
        return self.table[tokens]


def test_nats_and_divergence_are_those_of_the_definition(tmp_path):
    rng = np.random.default_rng(1)
    tables = rng.standard_normal((2, 3, 3))
    ids = [0, 2, 1, 1, 0, 2]
    p, q = (np.exp(t) / np.exp(t).sum(-1, keepdims=True) for t in tables)
    first = quality.evaluate(Fixed(tables[0]), ids, tmp_path / "first.npy")
    other = quality.evaluate(Fixed(tables[1]), ids, tmp_path / "first.npy")
    nats = [-math.log(q[a, b]) for a, b in itertools.pairwise(ids)]
    divergence = [(p[a] * np.log(p[a] / q[a])).sum() for a in ids[:-1]]
    assert np.allclose(first.divergence, 0) and first.nats.shape == (5,)
    assert np.allclose(other.nats, nats, rtol=1e-5)
    assert np.allclose(other.divergence, divergence, rtol=1e-4)
    model = Fixed(tables[1])
    text_nats = train_script("measure").text_nats
    assert text_nats(model, ids, step=2) == pytest.approx(sum(nats), rel=1e-5)
    assert model.seen == [2, 2, 1], "the last token predicts nothing"


def test_a_mean_comes_with_its_standard_error():
    found = quality.mean("x", np.array([1.0, 2.0, 3.0, 6.0]))
    assert found == {"x": 3.0, "x_error": pytest.approx(np.sqrt(14 / 3) / 2)}


GOOD = "source q4 q4+gates q4+gates8 q4=size q4+gates=size mxfp4+gates q3@embedding q4@KDA-gates"
BAD = (
    "q7 source+gates q4=size+gates mxfp4=size mxfp4+gates8 q4+gates4 source@head q4@ q4@nothing "
    "q4+gates@head mxfp4@head q4=size@head"
)


@pytest.mark.parametrize("name", GOOD.split())
def test_recipes_have_names(name):
    recipe = quality.Recipe.parse(name)
    assert str(recipe) == name and recipe.words()


@pytest.mark.parametrize("name", ["", *BAD.split()])
def test_other_names_are_refused(name):
    with pytest.raises(UserError, match="no recipe"):
        quality.Recipe.parse(name)


def test_what_a_recipe_quantises(tmp_path):
    """+gates packs the gate path and nothing more; =size keeps the size and chooses for it too."""
    found = {}
    for name in ("q4", "q4+gates", "q4=size", "q4+gates=size"):
        options = quality.Recipe.parse(name).options(TINY, tmp_path)
        found[name] = convert(TINY, tmp_path / "out", **options, overwrite=True)
    gates = {path for path, why in found["q4"].kept.items() if why == GATE_PATH}
    assert {path.rpartition(".")[2] for path in gates} == {
        *("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj")
    }
    kept = {name: set(report.kept) & gates for name, report in found.items()}
    assert kept["q4"] == gates and kept["q4+gates"] == kept["q4+gates=size"] == set()
    assert {path.rpartition(".")[2] for path in kept["q4=size"]} <= {"b_proj"}
    size = found["q4"].bytes_out
    assert found["q4+gates"].bytes_out < size
    for name in ("q4=size", "q4+gates=size"):
        assert 0.99 * size < found[name].bytes_out <= size


def test_a_family_alone_is_quantised(tmp_path):
    recipe = quality.Recipe.parse("q3@shared-experts")
    report = convert(TINY, tmp_path / "out", **recipe.options(TINY, tmp_path))
    packed = {family for family, how in report.bits.items() if any("3 bits" in h for h in how)}
    assert packed == {"shared experts"} and report.bits["shared experts"].values()
    # 21 matrices, each with the error of 3 bits in groups of 64 on nearly normal weights
    assert len(family_paths(TINY, "shared experts")) == 21
    assert 21 * 0.02 < recipe.relative_error(TINY) < 21 * 0.06
    with pytest.raises(UserError, match="no norms"):
        family_paths(TINY, "norms")
    assert sum(len(family_paths(TINY, family)) for family in FAMILIES) == 118


@pytest.mark.parametrize("bits", [3, 4])
def test_a_byte_budget_is_never_worse_than_uniform_bits(bits):
    """At 4.95 bits per weight it was: divergence 0.40 against 0.27; docs/quality.md has 3 to 6."""
    names = ("source", f"q{bits}", f"q{bits}=size")
    found = {row["recipe"]: row for row in quality.rows(TINY, TEXT, names)}
    uniform, chosen = found[f"q{bits}"], found[f"q{bits}=size"]
    assert chosen["bits_per_weight"] <= uniform["bits_per_weight"]
    assert chosen["divergence"] < 0.7 * uniform["divergence"]
    assert chosen["perplexity"] < uniform["perplexity"]


def run(*argv):
    return common.run(None, quality.add_arguments, quality.main, argv)


def test_the_script(tiny_hf, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a river.")
    argv = [str(tiny_hf), "--text", str(text), "--recipes", "source,q4"]
    assert run(*argv, "--out", str(tmp_path / "out")) == 0
    assert "| source |" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert [row["recipe"] for row in record["rows"]] == ["source", "q4"]
    assert record["rows"][0]["divergence"] == 0 < record["rows"][1]["divergence"]


@pytest.mark.parametrize(
    ("content", "recipes", "word"),
    [
        (b"one two three", "q9", "no recipe 'q9'"),
        (b"", "source", "at least three tokens"),
        (b"\xff\xfe", "source", "not UTF-8 text"),
        (None, "source", "cannot read"),
    ],
)
def test_mistakes_end_with_one_line(tiny_hf, tmp_path, fails, content, recipes, word):
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    fails(run(str(tiny_hf), "--text", str(text), "--recipes", recipes), word)


def test_the_page_comes_from_the_record():
    module = train_script("quality")
    assert module.PAGE.read_text(encoding="utf-8") == module.page(*module.records())


@pytest.mark.parametrize(
    ("rise", "word"), [(0.02, "keeping it is better"), (-0.03, "worse"), (0.015, "no difference")]
)
def test_the_page_claims_no_difference_within_two_standard_errors(rise, word):
    row = {"gates_divergence": rise, "gates_divergence_error": 0.009}
    assert word in train_script("quality").verdict(row)
