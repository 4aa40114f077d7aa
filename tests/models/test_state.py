"""What the model carries from step to step: splits, short sequences, padding, long runs."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from helpers.tiny import difference, run, tiny_model, tokens
from mlx_lm.models.cache import ArraysCache, BatchKVCache
from tolerances import MODEL_LONG, MODEL_SPLIT

from mlx_kda.errors import UserError

PAD_IDS = (0, 77)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize(
    "parts",
    [[200, 100], [1] * 300, [63, 237], [64, 236], [2, 298], [299, 1]],
    ids=lambda parts: "+".join(map(str, parts[:3])),
)
def test_the_split_does_not_matter(model, parts):
    """300 tokens fed in parts give the logits of one prefill."""
    ids = tokens(300)
    assert difference(run(model, ids, parts), run(model, ids)) < MODEL_SPLIT


def test_a_dropped_state_would_be_seen(model):
    """With the KDA states emptied between two parts the logits are far off."""
    ids = tokens(300)
    cache = model.make_cache()
    run(model, ids[:, :200], cache=cache)
    for layer_cache in cache[:3]:
        layer_cache[3] = mx.zeros_like(layer_cache[3])
    wrong = run(model, ids[:, 200:], cache=cache)
    assert difference(wrong, model(ids)[:, 200:]) > 0.05


def test_a_prompt_one_longer_than_the_prefill_step(model):
    """2,049 tokens in steps of 2,048."""
    ids = tokens(2049)
    parts = run(model, ids, [2048, 1])
    whole = model(ids)
    assert difference(parts, whole) < MODEL_SPLIT
    assert difference(parts[:, -1], whole[:, -1]) < MODEL_SPLIT


def test_4096_equal_tokens(model):
    """One token 4,096 times: finite, and equal to step by step at either end."""
    ids = mx.full((1, 4096), 7)
    cache = model.make_cache()
    most = run(model, ids[:, :3968], [2048, 1920], cache)
    stepped = copy.deepcopy(cache)
    last = run(model, ids[:, 3968:], cache=cache)
    assert mx.all(mx.isfinite(most)).item() and mx.all(mx.isfinite(last)).item()
    assert difference(last, run(model, ids[:, 3968:], [1] * 128, stepped)) < MODEL_LONG
    for a, b in zip(cache[:3], stepped[:3], strict=True):
        assert difference(a[3], b[3]) < MODEL_LONG
    assert difference(most[:, :256], run(model, ids[:, :256], [1] * 256)) < MODEL_LONG


@pytest.mark.parametrize("T", range(1, 9))
def test_sequences_shorter_than_the_convolution(model, T):
    """1 to 8 tokens at once, token by token, and in every split in two."""
    ids = tokens(T, seed=T)
    whole = model(ids)
    assert difference(run(model, ids, [1] * T), whole) < MODEL_SPLIT
    for cut in range(1, T):
        assert difference(run(model, ids, [cut, T - cut]), whole) < MODEL_SPLIT


def test_no_token_is_a_no_op(model):
    """T = 0 gives no rows, at the start and in the middle, and changes nothing."""
    none = mx.zeros((1, 0), dtype=mx.int32)
    assert model(none).shape == (1, 0, 128)
    ids = tokens(9)
    cache = model.make_cache()
    for part in (none, ids[:, :5], none, ids[:, 5:]):
        logits = model(part, cache=cache)
        assert logits.shape == (1, part.shape[1], 128)
    assert difference(logits, model(ids)[:, 5:]) < MODEL_SPLIT
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        model(mx.array([1, 2, 3]))


def alone(model, ids: mx.array, more: list[mx.array]) -> list[mx.array]:
    """Last logits of a prompt [1, n] by itself, then those of each further token [1, 1]."""
    cache = model.make_cache()
    return [run(model, part, cache=cache)[0, -1] for part in (ids, *more)]


def batch_cache(model, left_padding: list[int]) -> list:
    return [
        ArraysCache(4, left_padding=left_padding) if layer.is_linear else BatchKVCache(left_padding)
        for layer in model.layers
    ]


@pytest.mark.parametrize("pad", PAD_IDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_enter_the_state(model, pad, side):
    """9 and 37 tokens in one batch, chunks of 16/16/5; then a row goes and one comes."""
    prompts = [tokens(9, seed=1), tokens(37, seed=2)]
    steps = [[tokens(1, seed=10 * b + t) for t in range(4)] for b in range(3)]
    want = [alone(model, p, s) for p, s in zip(prompts, steps, strict=False)]

    padding = [37 - p.shape[1] for p in prompts]
    fill = [mx.full((1, n), pad, dtype=prompts[0].dtype) for n in padding]
    if side == "left":
        rows = [mx.concatenate([f, p], axis=1) for f, p in zip(fill, prompts, strict=True)]
        cache = batch_cache(model, padding)
    else:
        rows = [mx.concatenate([p, f], axis=1) for f, p in zip(fill, prompts, strict=True)]
        cache = batch_cache(model, [0, 0])
        for c in cache:
            c.prepare(lengths=[p.shape[1] for p in prompts], right_padding=padding)
    logits = run(model, mx.concatenate(rows), [16, 16, 5], cache)
    for c in cache:
        c.finalize()
    ends = [36, 36] if side == "left" else [8, 36]
    for b in range(2):
        assert difference(logits[b, ends[b]], want[b][0]) < MODEL_SPLIT

    for t in range(2):
        step = model(mx.concatenate([steps[0][t], steps[1][t]]), cache=cache)
        for b in range(2):
            assert difference(step[b, 0], want[b][t + 1]) < MODEL_SPLIT

    for c in cache:  # drop the longer row
        c.filter(mx.array([0]))
    newcomer = tokens(5, seed=3)
    fresh = model.make_cache()
    run(model, newcomer, cache=fresh)
    for c, f in zip(cache, fresh, strict=True):  # and let another in
        c.extend(type(f).merge([f]))
    third = alone(model, newcomer, steps[2])
    for t in range(2):
        step = model(mx.concatenate([steps[0][t + 2], steps[2][t]]), cache=cache)
        assert difference(step[0, 0], want[0][t + 3]) < MODEL_SPLIT
        assert difference(step[1, 0], third[t + 1]) < MODEL_SPLIT


@pytest.mark.parametrize("pad", PAD_IDS)
def test_a_row_may_be_all_padding(model, pad):
    """In the last chunk the short row has no token left, and in the first none yet."""
    short, long = tokens(2, seed=4), tokens(20, seed=5)
    for side in ("left", "right"):
        fill = mx.full((1, 18), pad, dtype=short.dtype)
        row = [fill, short] if side == "left" else [short, fill]
        rows = mx.concatenate([mx.concatenate(row, axis=1), long])
        cache = batch_cache(model, [18, 0] if side == "left" else [0, 0])
        if side == "right":
            for c in cache:
                c.prepare(lengths=[2, 20], right_padding=[18, 0])
        run(model, rows, [5, 5, 5, 5], cache)
        for c in cache:
            c.finalize()
        nxt = tokens(1, seed=6)
        step = model(mx.concatenate([nxt, nxt]), cache=cache)
        assert difference(step[0, 0], alone(model, short, [nxt])[1]) < MODEL_SPLIT
        assert difference(step[1, 0], alone(model, long, [nxt])[1]) < MODEL_SPLIT


def test_evaluating_the_logits_leaves_no_graph_behind(model, tmp_path):
    """After a step every array of the cache is evaluated: no graph grows from step to step."""
    cache = model.make_cache()
    ids = tokens(40)
    for part in (ids[:, :30], ids[:, 30:31], ids[:, 31:32], ids[:, 32:]):
        mx.eval(model(part, cache=cache))
        arrays = [a for c in cache[:3] for a in c.cache]
        arrays += [cache[3].keys, cache[3].values]
        dot = tmp_path / "cache.dot"
        mx.export_to_dot(str(dot), *arrays)
        assert "->" not in dot.read_text()


def test_batches_equal_their_rows(model):
    rows = mx.concatenate([tokens(33, seed=s) for s in range(3)])
    together = run(model, rows, [20, 13])
    for b in range(3):
        assert difference(together[b : b + 1], model(rows[b : b + 1])) < MODEL_SPLIT


def test_other_layouts_of_layers():
    """All KDA, all MLA, MLA first, no experts, tied embeddings, no convolution, no shared keys."""
    ids = tokens(30)
    for changes in (
        {"kda_layers": [1, 2, 3, 4], "full_attn_layers": []},
        {"kda_layers": [], "full_attn_layers": [1, 2, 3, 4]},
        {"kda_layers": [2, 4], "full_attn_layers": [1, 3]},
        {"num_experts": 0},
        {"tie_word_embeddings": True},
        {"short_conv_kernel_size": 1},
        {"qk_rope_head_dim": 0},
    ):
        model = tiny_model(**changes)
        whole = model(ids)
        assert np.isfinite(np.array(whole)).all()
        assert difference(run(model, ids, [7, 1, 22]), whole) < MODEL_SPLIT, changes


def test_an_unknown_policy_or_runner_is_refused_by_name(model):
    with pytest.raises(UserError, match="window"):
        model.make_cache("window")
    with pytest.raises(UserError, match="abacus"):
        model.runner = "abacus"
    assert model.runner == "ops"
