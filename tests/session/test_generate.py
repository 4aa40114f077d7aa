"""Streaming text: stop tokens, unbroken characters, statistics, and prompts that cannot be."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.scripted import Scripted
from helpers.tiny_checkpoint import SPECIAL_IDS, VOCABULARY
from mlx_lm.sample_utils import make_sampler

from mlx_kda.context import Context
from mlx_kda.errors import UserError
from mlx_kda.generate import Statistics, decode_text, peak_memory, stream_generate

PROMPT = [104, 105]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return tiny_model[1]


def say(tokenizer, script, **options):
    """Pieces of a model that says ``script`` after PROMPT, and the context it said it in."""
    context = Context(Scripted(VOCABULARY, start=len(PROMPT), script=script))
    options.setdefault("max_tokens", 100)
    pieces = stream_generate(context.model, tokenizer, PROMPT, context=context, **options)
    return list(pieces), context


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("end", ["[EOS]", "<|im_end|>"])
def test_stops_at_both_end_tokens(tokenizer, end):
    """Either end token stops, by id, and neither is printed."""
    script = [*b"Hello", SPECIAL_IDS[end], *b"never"]
    pieces, context = say(tokenizer, script)
    assert text_of(pieces) == "Hello"
    assert pieces[-1].token == SPECIAL_IDS[end]
    assert pieces[-1].statistics.finish_reason == "stop"
    assert [p.statistics.finish_reason for p in pieces[:-1]] == [None] * 5
    assert context.tokens == PROMPT + script[:6], "the end token is absorbed, nothing after it"


def test_spelled_end_token_does_not_stop(tokenizer):
    """An end token written out in letters is text like any other."""
    pieces, _ = say(tokenizer, [*b"<|im_end|>", *b" more", SPECIAL_IDS["[EOS]"]])
    assert text_of(pieces) == "<|im_end|> more"


@pytest.mark.parametrize("name", sorted(SPECIAL_IDS))
def test_no_control_token_is_printed(tokenizer, name):
    """With no stop ids the run goes on, and control tokens still stay out of the text."""
    pieces, _ = say(tokenizer, [*b"a", SPECIAL_IDS[name], *b"b"], stop_ids=[], max_tokens=3)
    assert [p.token for p in pieces] == [97, SPECIAL_IDS[name], 98]
    assert text_of(pieces) == "ab"
    assert pieces[-1].statistics.finish_reason == "length"


@pytest.mark.parametrize(
    "text",
    [
        "na\u00efve caf\u00e9",
        "\u6f22\u5b57\u3068\u4eee\u540d",
        "ok \U0001f9ea\U0001f680 go",
        " lead",
        "a  b \n\n c ",
        "\t",
    ],
)
def test_characters_are_never_broken(tokenizer, text):
    """One byte a token: no piece shows half a character, and no space is lost or made up."""
    script = [*text.encode(), SPECIAL_IDS["[EOS]"]]
    pieces, _ = say(tokenizer, script)
    assert text_of(pieces) == text
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert len(pieces) == len(script), "a piece for every token"


def test_text_held_back_comes_with_the_last_piece(tokenizer):
    """A run cut inside a character shows that something is missing, whatever ended it."""
    half = "\u6f22".encode()[:2]
    for script, options in (
        ([*b"ok", *half, SPECIAL_IDS["[EOS]"]], {}),
        ([*b"ok", *half, 97], {"max_tokens": 4}),
    ):
        pieces, _ = say(tokenizer, script, **options)
        assert text_of(pieces).rstrip("\ufffd") == "ok"
        assert text_of(pieces).endswith("\ufffd")


def test_bytes_that_are_no_text_do_not_stop_the_text(tokenizer):
    pieces, _ = say(tokenizer, [*b"a\xff\xfe", *b"bc", SPECIAL_IDS["[EOS]"]])
    text = text_of(pieces)
    assert text.startswith("a") and text.endswith("bc")


def test_max_tokens_zero_reads_the_prompt_only(tokenizer):
    statistics = Statistics()
    pieces, context = say(tokenizer, list(b"abc"), max_tokens=0, statistics=statistics)
    assert pieces == [] and context.tokens == PROMPT
    assert statistics.prefilled_tokens == 2 and statistics.finish_reason == "length"


def test_going_on_from_a_context(tokenizer):
    _, context = say(tokenizer, list(b"abcdef"), max_tokens=2)
    more = decode_text(context, tokenizer, max_tokens=2)
    assert text_of(more) == "cd"
    pieces = list(stream_generate(context.model, tokenizer, [], context=context, max_tokens=2))
    assert text_of(pieces) == "ef"
    assert pieces[0].statistics.reused_tokens == 6 and pieces[0].statistics.prefilled_tokens == 0


def test_mistakes_are_told_at_once(tokenizer, tiny_model):
    """Not from the first piece: a caller learns of them before it has printed anything."""
    model, _ = tiny_model
    for prompt, options, message in (
        ([], {}, "the prompt is empty"),
        ("", {}, "the prompt is empty"),
        (mx.array([], dtype=mx.int32), {}, "the prompt is empty"),
        ([1], {"max_tokens": -1}, "max_tokens must be 0 or more, not -1"),
        ([1] * 513, {}, "513 tokens is longer than the model's context of 512"),
    ):
        with pytest.raises(UserError, match=message):
            stream_generate(model, tokenizer, prompt, **options)


def test_a_prompt_may_be_text_ids_or_an_array_of_one_row(tokenizer, tiny_model):
    text, ids = "in the end", list(tokenizer.encode("in the end"))
    prompts = text, ids, mx.array(ids), mx.array([ids]), np.array(ids), np.array([ids])
    said = [[p.token for p in stream_generate(*tiny_model, one, max_tokens=3)] for one in prompts]
    assert said == [said[0]] * len(prompts)


def test_generation_ends_at_the_context_limit(tokenizer, tiny_model):
    model, _ = tiny_model
    pieces = list(stream_generate(model, tokenizer, [5] * 509, max_tokens=20, stop_ids=[]))
    assert len(pieces) == 3
    assert pieces[-1].statistics.finish_reason == "length"


def test_statistics(tokenizer):
    pieces, _ = say(tokenizer, list(b"abc"), max_tokens=3)
    first, last = pieces[0].statistics, pieces[-1].statistics
    assert first.generation_tokens == 1, "a piece keeps the numbers of its own time"
    assert last.generation_tokens == 3 and last.prompt_tokens == last.prefilled_tokens == 2
    assert last.generation_seconds > first.generation_seconds > 0 and last.prompt_seconds > 0
    assert last.generation_tps == pytest.approx(3 / last.generation_seconds)
    assert last.prompt_tps == pytest.approx(2 / last.prompt_seconds)
    assert last.peak_memory > 0 and last.peak_memory_source in ("mlx", "process")
    assert last.as_dict()["generation_tps"] == last.generation_tps
    assert Statistics().prompt_tps == Statistics().generation_tps == 0


def test_peak_memory_falls_back_to_the_process(monkeypatch):
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 0)
    peak, source = peak_memory()
    assert source == "process" and peak > 10_000_000


def test_seeded_sampling_repeats(tokenizer, tiny_model):
    model, _ = tiny_model

    def run(seed):
        options = {"sampler": make_sampler(1.0), "seed": seed, "stop_ids": [], "max_tokens": 16}
        return [p.token for p in stream_generate(model, tokenizer, PROMPT, **options)]

    assert run(1) == run(1)
    assert run(1) != run(2)


NO_PROMPTS = {
    "nothing": (None, "text or token ids, not NoneType"),
    "a number": (5, "text or token ids, not int"),
    "bytes": (b"hi", "text or token ids, not bytes"),
    "a batch": (mx.array([[5, 6], [7, 8]]), r"not \[2, 2\]"),
    "numpy's batch": (np.array([[5, 6], [7, 8]]), r"not \[2, 2\]"),
    "no dimensions": (mx.array(5), r"not \[\]"),
    "fractions": (mx.array([1.5]), "whole numbers"),
    "half a pair": ("a\ud800", "half a surrogate pair"),
}


@pytest.mark.parametrize("name", NO_PROMPTS)
def test_what_is_no_prompt_is_refused(tiny_model, name):
    """A batch was read as one text, row after row, and bytes as token ids."""
    prompt, message = NO_PROMPTS[name]
    with pytest.raises(UserError, match=message):
        list(stream_generate(*tiny_model, prompt, max_tokens=1))
