"""The text that logits processors see: the right ids at any time, at a cost that does not grow."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from mlx_kda.context import Context
from mlx_kda.generate import decode_text
from mlx_kda.sampling import ROOM, TokenBuffer

IDS = [(3 * i * i + 5 * i + 1) % 128 for i in range(41)]


@pytest.mark.parametrize("start", [0, 1, 40, ROOM - 1, ROOM, 2 * ROOM])
def test_it_is_the_text_through_growth(start):
    known = list(range(start))
    buffer = TokenBuffer(known)
    for step in range(2 * ROOM + 3):
        buffer.extend(mx.array([step % 7], dtype=mx.uint32))
        known.append(step % 7)
        if step % 97 < 3:
            assert buffer.before(buffer.length).tolist() == known
            assert buffer.before(start).tolist() == known[:start]
    assert buffer.before(buffer.length).dtype == mx.int32 and buffer.length == len(known)


def test_guesses_are_written_and_cut_again():
    """As speculation does: any number ahead, any number of them right."""
    rng = np.random.default_rng(0)
    known, buffer = [], TokenBuffer([])
    for _ in range(500):
        guess = rng.integers(0, 100, rng.integers(1, 8)).tolist()
        right = int(rng.integers(0, len(guess) + 1))
        buffer.extend(mx.array(guess))
        for i in range(len(guess) + 1):
            assert buffer.before(len(known) + i)[-8:].tolist() == [*known, *guess[:i]][-8:]
        buffer.cut(len(known) + right)
        known += guess[:right]
        if rng.integers(0, 2):
            buffer.extend(mx.array([5]))
            known.append(5)
        assert buffer.before(buffer.length).tolist() == known


def test_an_array_given_out_does_not_change():
    """A processor may keep what it was given; a step in flight does."""
    buffer = TokenBuffer([1, 2, 3])
    kept = []
    for token in range(40):
        kept.append(buffer.before(buffer.length))
        buffer.extend(mx.array([token]))
    for n, array in enumerate(kept):
        assert array.tolist() == [1, 2, 3, *range(n)]


def test_a_token_copies_no_long_text():
    """A million ids are 4 MB: writing one more in place allocates next to nothing."""
    buffer = TokenBuffer([0] * 1_000_000)
    ahead = None
    allocated = []
    for token in range(12):
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        buffer.extend(mx.array([token]))
        last = buffer.before(buffer.length)[-20:].sum()
        mx.async_eval(last)
        if ahead is not None:
            ahead.item()  # one step behind, as in decoding
        ahead = last
        mx.synchronize()
        allocated.append(mx.get_peak_memory() - before)
    assert sorted(allocated)[6] < 1_000_000, allocated


@pytest.mark.parametrize("speculate", [False, True])
def test_decoding_with_a_penalty_is_that_of_a_text_read_anew(tiny_model, speculate):
    """The repetition penalty sees the same text in either way of decoding."""
    model, tokenizer = tiny_model
    processors = make_logits_processors(repetition_penalty=1.3)
    context = Context(model)
    context.prefill(IDS)
    options = {"logits_processors": processors, "speculate": speculate}
    pieces = decode_text(context, tokenizer, max_tokens=24, stop_ids=[], **options)
    said = [piece.token for piece in pieces]
    text = list(IDS)
    for token in said:
        fresh = Context(model)
        fresh.prefill(text)
        logits = processors[0](mx.array(text), fresh.logits)
        assert token == mx.argmax(logits).item()
        text.append(token)
