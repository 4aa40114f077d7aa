"""Speculation by look-up: the tokens of plain decoding, with exact rollback of the states."""

import mlx.core as mx
import pytest
from helpers.paths import EXAMPLES
from helpers.scripted import Scripted
from helpers.tiny import difference, tiny_model, tokens
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from tolerances import MODEL_SPLIT

import mlx_kda
from mlx_kda import prompt_lookup
from mlx_kda.context import Context, NonFiniteLogits
from mlx_kda.errors import UserError
from mlx_kda.sampling import Sampling

EXAMPLE = EXAMPLES / "tiny-kimi-linear"
POLICIES = ["exact", "window:24+4", "int8"]
# Repeats itself, so that there is something to guess.
PROMPT = (tokens(25, seed=3)[0].tolist() * 4)[:90]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def read(model, ids, policy="exact"):
    context = Context(model, policy=policy)
    context.prefill(ids)
    return context


def said(context, n, sampling=None):
    acceptance = prompt_lookup.Acceptance()
    sampling = sampling or Sampling()
    return list(prompt_lookup.decode(context, n, sampling, acceptance)), acceptance


def assert_same_states(a, b):
    """Every array of both caches, bit for bit."""
    for one, other in zip(a.cache, b.cache, strict=True):
        if hasattr(one, "storage"):
            pairs = zip(one.storage.parts(), other.storage.parts(), strict=True)
            arrays = [pair for parts in pairs for pair in zip(*parts, strict=True)]
        else:
            arrays = list(zip(one.cache, other.cache, strict=True))
        assert arrays and all(mx.array_equal(x, y) for x, y in arrays)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_tokens_of_plain_decoding(model, policy):
    """Token by token what greedy decoding says, and its state at the end."""
    processors = make_logits_processors(logit_bias=dict.fromkeys(range(6), 12.0))
    plain = read(model, PROMPT, policy)
    want = list(plain.decode(120, logits_processors=processors))
    context = read(model, PROMPT, policy)
    got, acceptance = said(context, 120, Sampling(processors=processors))
    assert got == want
    assert context.tokens == PROMPT + want
    assert mx.array_equal(context.logits, plain.logits)
    assert_same_states(context, plain)
    assert 0 < acceptance.accepted < acceptance.drafted, "guesses of both kinds are wanted here"
    assert acceptance.passes < 120


@pytest.mark.parametrize("policy", ["exact", "window:32+4", "int4"])
def test_in_bfloat16_to_the_last_bit(policy):
    """Two tokens often have the same logit in bfloat16, so one bit would tell."""
    model, tokenizer = mlx_kda.load(EXAMPLE)
    prompt = list(tokenizer.encode("And the king said to the king that the king said to the king"))
    plain, context = (read(model, prompt, policy) for _ in range(2))
    want = list(plain.decode(80))
    got, acceptance = said(context, 80)
    assert got == want and mx.array_equal(context.logits, plain.logits)
    assert_same_states(context, plain)
    assert 0 < acceptance.accepted < acceptance.drafted


@pytest.mark.parametrize("taken", [1, 2, 3, 7, 20])
def test_closing_early_leaves_exactly_the_yielded_tokens(model, taken):
    context = read(model, PROMPT)
    stream = prompt_lookup.decode(context, 60, Sampling(), prompt_lookup.Acceptance())
    got = [next(stream) for _ in range(taken)]
    stream.close()
    assert context.tokens == PROMPT + got
    assert difference(context.logits, read(model, PROMPT + got).logits) < MODEL_SPLIT


def test_a_seeded_draw_is_the_same_too(model):
    sampling = Sampling(
        make_sampler(0.8, top_k=20), make_logits_processors(repetition_penalty=1.1), seed=7
    )
    plain = read(model, PROMPT)
    want = list(
        plain.decode(
            40, sampler=sampling.sampler, logits_processors=sampling.processors, seed=sampling.seed
        )
    )
    assert said(read(model, PROMPT), 40, sampling)[0] == want


def test_a_text_that_repeats_takes_few_passes():
    """A model that says 0 1 2 ... 9 over and over: all guesses are right after the first round."""
    script = list(range(1, 11)) * 12
    context = read(Scripted(16, start=2, script=script), [11, 12])
    got, acceptance = said(context, 118)
    assert got == script[:118]
    assert acceptance.accepted == acceptance.drafted > 80
    assert acceptance.passes < 40
    # exactly as many tokens as were asked for, whatever was guessed beyond
    assert len(context.tokens) == 120


def test_wrong_guesses_are_read_again_at_most_once_over(model, monkeypatch):
    """Guesses that never are right cost no pass: every pass still gives a token."""
    monkeypatch.setattr(prompt_lookup.Index, "guess", lambda self, most: [127] * most)
    plain = read(model, PROMPT)
    want = list(plain.decode(30))
    assert 127 not in want
    context = read(model, PROMPT)
    got, acceptance = said(context, 30)
    assert got == want and acceptance.accepted == 0 and acceptance.passes == 29
    assert_same_states(context, plain)


def test_index_finds_the_longest_ending_that_has_a_next_token():
    index = prompt_lookup.Index([1, 2, 3, 9, 2, 3, 7, 1, 2, 3])
    assert index.guess(3) == [9, 2, 3]
    index.append(9)
    assert index.guess(2) == [2, 3]
    assert prompt_lookup.Index([5, 6, 7]).guess(7) == []
    assert prompt_lookup.Index([5, 5, 5]).guess(7) == [5]
    assert prompt_lookup.Index([]).guess(7) == []


def test_non_finite_logits_end_it():
    context = read(Scripted(16, start=3, script=[1, 2, 3, 4], poison=5), [5, 6, 7])
    stream = prompt_lookup.decode(context, 9, Sampling(), prompt_lookup.Acceptance())
    with pytest.raises(NonFiniteLogits):
        list(stream)


def test_a_cache_that_cannot_go_back_is_refused(model):
    context = read(model, PROMPT)
    context.cache = [RotatingKVCache(8), *context.cache[1:]]
    with pytest.raises(UserError, match="RotatingKVCache cannot be rewound"):
        said(context, 3)
