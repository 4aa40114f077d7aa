"""Context: the ids and the cache are in step wherever a run is split or stopped."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.scripted import Scripted
from helpers.tiny import stock_model, tiny_config, tiny_weights
from helpers.tiny_checkpoint import VOCABULARY
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from tolerances import MODEL_SPLIT

from mlx_kda.context import Context, NonFiniteLogits
from mlx_kda.errors import UserError
from mlx_kda.step import CPU_STEP, GPU_STEP, prefill_step

IDS = [(7 * i * i + 3 * i) % VOCABULARY for i in range(41)]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model[0]


def read(model, ids, policy="exact", **options):
    """``ids`` read on a fresh cache, in one go unless ``options`` say otherwise."""
    context = Context(model, policy=policy)
    context.prefill(ids, **options)
    return context


def difference(a, b):
    return mx.abs(a - b).max().item()


def test_decode_takes_the_tokens_that_mlx_lm_takes(model):
    context = read(model, IDS)
    theirs = [token for token, _ in generate_step(mx.array(IDS), model, max_tokens=24)]
    assert list(context.decode(24)) == theirs
    assert len(set(theirs)) > 4, "a model that repeats itself shows little"


@pytest.mark.parametrize("step", [1, 2, 7, 40, 41, 42])
def test_prefill_step_changes_nothing(model, step):
    """Any chunking of the prompt gives the same logits and the same continuation."""
    whole, split = read(model, IDS), read(model, IDS, step=step)
    largest = max(1, mx.abs(whole.logits).max().item())
    assert difference(whole.logits, split.logits) < MODEL_SPLIT * largest
    assert list(whole.decode(8)) == list(split.decode(8))


@pytest.mark.parametrize("length", range(1, 9))
def test_short_prompts(model, length):
    """Prompts shorter than the convolution's window, in one go and token by token."""
    context = Context(model)
    for token in IDS[:length]:
        context.prefill([token])
    assert difference(context.logits, read(model, IDS[:length]).logits) < 1e-5
    assert context.tokens == IDS[:length]


def test_empty_prompt(model):
    """No tokens change nothing; going on from nothing is refused in words."""
    context = Context(model)
    context.prefill([])
    assert context.tokens == [] and context.logits is None
    with pytest.raises(UserError, match="nothing to continue from"):
        next(context.decode(1))
    context.prefill(IDS)
    before = context.logits
    context.prefill([])
    assert context.tokens == IDS and difference(before, context.logits) == 0


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_closing_early_leaves_exactly_the_yielded_tokens(model, taken):
    context = read(model, IDS)
    stream = context.decode(20)
    said = [next(stream) for _ in range(taken)]
    stream.close()
    assert context.tokens == IDS + said
    assert difference(context.logits, read(model, IDS + said).logits) < 1e-5
    # and going on is what a run that was never stopped would have done
    through = read(model, IDS)
    assert said + list(context.decode(6)) == list(through.decode(taken + 6))


def test_default_steps_are_short_on_a_cpu_and_long_on_a_gpu(model, monkeypatch):
    """A request to stop waits for one step; both step sizes give the same result."""
    assert prefill_step() == CPU_STEP
    seen = []
    whole = read(model, IDS * 5, step=1000)
    split = read(model, IDS * 5, progress=lambda done, total: seen.append(done))
    assert seen == [0, 64, 128, 192, 205]
    limit = MODEL_SPLIT * mx.abs(whole.logits).max()
    assert difference(whole.logits, split.logits) < limit
    assert list(whole.decode(8)) == list(split.decode(8))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert prefill_step() == GPU_STEP == 2048


class Counting(nn.Module):
    """A foreign model by mlx-lm's contract, whose logits need nothing of its last cache entry.

    So nothing but an evaluation of the cache itself keeps that entry's graph short.
    """

    def make_cache(self):
        return [ArraysCache(size=1), ArraysCache(size=2)]

    def __call__(self, inputs, cache):
        said = inputs.sum() if cache[0][0] is None else cache[0][0] + inputs.sum()
        cache[0][0] = said
        seen = mx.zeros((4,)) if cache[1][1] is None else cache[1][1]
        cache[1][0] = cache[1][1] = seen + inputs.shape[1]
        rows = mx.broadcast_to((mx.arange(8) == said % 8)[None, None], (1, inputs.shape[1], 8))
        return rows.astype(mx.float32)


@pytest.mark.parametrize("kind", ["counting", "stock"])
def test_a_foreign_model_s_cache_is_evaluated_every_step(kind, tmp_path):
    """Also for models of mlx-lm, which tie no cache to their logits as ours do."""
    config = tiny_config()
    foreign = Counting() if kind == "counting" else stock_model(config, tiny_weights(config))
    context = Context(foreign)

    def lazy():
        states = [entry.state for entry in context.cache]
        arrays = [a for _, a in tree_flatten(states) if isinstance(a, mx.array)]
        assert len(arrays) >= 3
        mx.synchronize()
        mx.export_to_dot(str(tmp_path / "graph.dot"), *arrays)
        return "->" in (tmp_path / "graph.dot").read_text()

    with pytest.raises(InterruptedError):
        context.prefill([1, 2, 3, 4, 5, 6], step=4, progress=_stop_after_one)
    assert context.logits is None and not lazy(), "after a chunk that is not the last"
    context.prefill([5, 6])
    assert not lazy()
    for _ in context.decode(4):
        assert not lazy()


def _stop_after_one(done, total):
    if done:
        raise InterruptedError


def test_non_finite_logits_end_a_prefill():
    context = Context(Scripted(16, start=3, script=[1, 2], poison=3))
    with pytest.raises(NonFiniteLogits, match="not finite after 3 tokens"):
        context.prefill([5, 6, 7])
    assert context.tokens == [] and context.logits is None


def test_non_finite_logits_end_a_generation():
    context = Context(Scripted(16, start=3, script=[1, 2, 3, 4], poison=5))
    context.prefill([5, 6, 7])
    stream = context.decode(4)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(NonFiniteLogits, match="after 5 tokens"):
        next(stream)
    assert context.tokens == [], "a spoilt cache is not kept"


@pytest.mark.parametrize("at", [1, 4, 7])
def test_an_interrupt_inside_a_step_undoes_the_step(model, monkeypatch, at):
    """Layers absorb a step one after the other: one that was cut short is undone in all of them."""
    layers = [type(layer.self_attn) for layer in model.layers]
    mla, calls = layers[3], []
    attend = mla.__call__

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt  # the KDA layers before have absorbed the chunk
        return attend(self, *args, **kwargs)

    for policy in ("exact", "window:8+2", "int8"):
        context = read(model, IDS[:20], policy)
        calls.clear()
        monkeypatch.setattr(mla, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.prefill(IDS[20:32], step=4)
            list(context.decode(9))
        monkeypatch.setattr(mla, "__call__", attend)
        assert len(context.tokens) >= 20 + 4 * min(at - 1, 3)
        fresh = read(model, context.tokens, policy)
        assert context.logits is None or difference(context.logits, fresh.logits) < 1e-5
        context.prefill(IDS[32:])
        fresh.prefill(IDS[32:])
        # Logits of 10 and more, read in steps of 4 and in one go: rounding of float32.
        assert difference(context.logits, fresh.logits) < MODEL_SPLIT * mx.abs(fresh.logits).max()


def test_progress_may_end_a_prefill_between_chunks(model):
    class Enough(Exception):
        pass

    seen = []

    def progress(done, total):
        seen.append((done, total))
        if done == 16:
            raise Enough

    context = Context(model)
    with pytest.raises(Enough):
        context.prefill(IDS, step=8, progress=progress)
    assert seen == [(0, 41), (8, 41), (16, 41)]
    assert context.tokens == IDS[:16]
    context.prefill(IDS[16:])
    assert difference(context.logits, read(model, IDS).logits) < 1e-5


def test_a_seeded_draw_depends_on_its_position_only(model):
    options = {
        "sampler": make_sampler(0.9, top_p=0.95, top_k=40),
        "logits_processors": make_logits_processors(repetition_penalty=1.2),
    }
    runs = {}
    for seed in (3, 4):
        context = Context(model)
        context.prefill(IDS)
        runs[seed] = list(context.decode(12, seed=seed, **options))
    assert runs[3] != runs[4]
    context = read(model, IDS)
    parts = [token for n in (1, 4, 7) for token in context.decode(n, seed=3, **options)]
    assert parts == runs[3]


def test_the_context_limit_holds(model):
    context = Context(model)
    assert context.limit == 512
    with pytest.raises(UserError, match=r"513 tokens do not fit the model's context of 512"):
        context.prefill(IDS * 12 + IDS[:21])
    assert context.tokens == []
    context.prefill((IDS * 13)[:508])
    assert len(list(context.decode(50))) == 4 and context.room == 0
    assert list(context.decode(50)) == []


def test_only_the_last_row_of_logits_is_made():
    """mlx-lm's own models give every row; the last token is then read by itself."""
    model = Scripted(16, start=5, script=[1])
    context = Context(model)
    context.prefill([3] * 5, step=4)
    assert model.calls == [4, 1]
    context.prefill([3] * 6, step=4)
    assert model.calls[2:] == [4, 1, 1]
    assert context.logits.shape == (1, 16)


@pytest.mark.parametrize(
    "ids,word",
    [
        ([1, VOCABULARY], f"token id {VOCABULARY} is not in the model's vocabulary"),
        ([99999999], "token id 99999999 is not"),
        ([-1], "token id -1 is not"),
        ([1.5], "whole numbers"),
        (["a"], "whole numbers"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(model, ids, word):
    """MLX would read past the embedding's end: garbage, or the end of the process."""
    context = Context(model)
    context.prefill([1, 2])
    with pytest.raises(UserError, match=word):
        context.prefill(ids)
    assert context.tokens == [1, 2]
