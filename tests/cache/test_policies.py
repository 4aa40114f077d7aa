"""Policies for MLA latents: what a query sees, the same however a text is split, and its bytes."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.tiny import difference, run, tiny_model, tokens
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from tolerances import INT8_LATENTS, LAYER_FLOAT32, MODEL_SPLIT, PACKED_SPLIT

from mlx_kda.cache import LatentCache, Policy, latent_cache, make_cache
from mlx_kda.cache.latent_cache import TAIL
from mlx_kda.cache.policy import SPARE, describe
from mlx_kda.context import Context
from mlx_kda.errors import UserError
from mlx_kda.layers import MLA, mla

HIDDEN = 48


def layer(seed=0) -> MLA:
    mx.random.seed(seed)
    made = MLA(HIDDEN, 3, 16, 32, 24, 64)
    made.q_proj.weight = made.q_proj.weight * 4  # scores far from uniform
    mx.eval(made.parameters())
    return made


def inputs(T: int, B: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(5).standard_normal((B, T, HIDDEN)).astype(np.float32))


def parts_of(x, lengths):
    at = 0
    for n in lengths:
        yield x[:, at : at + n]
        at += n
    assert at == x.shape[1]


def through(mla_layer, x, policy, lengths):
    cache = LatentCache(Policy.parse(policy))
    out = []
    for part in parts_of(x, lengths):
        out.append(mla_layer(part, "causal", cache))
        mx.eval(out[-1], cache.state)
    assert cache.offset == x.shape[1]
    return mx.concatenate(out, axis=1), cache


@pytest.mark.parametrize("lengths", [[90], [1] * 90, [7, 1, 40, 42], [30, 60], [2, 88], [89, 1]])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 3), (8, 0), (8, 3), (40, 50), (90, 4)])
def test_a_window_is_the_mask_that_says_so(window, sinks, lengths):
    """Every query sees the sinks and the last tokens up to itself, in whatever chunks they come."""
    made, x = layer(), inputs(90)
    q, k = mx.arange(90)[:, None], mx.arange(90)
    mask = (k <= q) & ((k > q - window) | (k < sinks))
    got, cache = through(made, x, f"window:{window}+{sinks}", lengths)
    assert difference(got, made(x, mask)) < LAYER_FLOAT32
    assert cache.state[0].shape[2] == window + sinks + SPARE


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("policy", ["exact", "int8", "int4", "window:20+4", "window:20+4,int8"])
def test_both_forms_agree(monkeypatch, policy, form):
    """Few queries and many take different ways through packed rows; blocks of any size agree."""
    made, x = layer(), inputs(300, B=2)
    made.form = "auto"
    want, _ = through(made, x, policy, [150, 1, 149])
    made.form = form
    monkeypatch.setattr(mla, "DEQUANTIZED", 37)
    monkeypatch.setattr(mla, "WORKSPACE", 40_000)
    got, _ = through(made, x, policy, [150, 1, 149])
    assert difference(got, want) < LAYER_FLOAT32


def test_packed_rows_are_the_quantiser_s():
    """int8 attends over exactly what mx.quantize and mx.dequantize make of each latent."""
    made, x = layer(), inputs(60)
    kv = made.kv_a_proj_with_mqa(x)
    latent, shared = made.kv_a_layernorm(kv[..., :64])[:, None], kv[..., 64:][:, None]
    latent = mx.dequantize(*mx.quantize(latent, bits=4), bits=4)
    shared = mx.dequantize(*mx.quantize(shared, group_size=32, bits=8), group_size=32, bits=8)

    class Given:
        def update_and_fetch(self, *_):
            return latent, shared

    want = made(x, "causal", Given())
    got, _ = through(made, x, "int4", [60])
    assert difference(got, want) < LAYER_FLOAT32


@pytest.mark.parametrize("policy", ["exact", "window:50+4", "window:400", "int8", "window:50,int4"])
def test_the_split_does_not_matter(monkeypatch, policy):
    """Under every policy, with two MLA layers, across the end of a tail and of a block."""
    monkeypatch.setattr(latent_cache, "FIRST_BLOCK", 16)
    model = tiny_model(kda_layers=[1, 3], full_attn_layers=[2, 4], num_experts=0)
    ids = tokens(TAIL + 50)
    n = ids.shape[1]
    limit = PACKED_SPLIT if "int" in policy else MODEL_SPLIT
    whole = run(model, ids, [n], make_cache(model, policy, portable=False))
    for parts in ([1] * n, [100, n - 100], [TAIL - 1, 2, n - TAIL - 1], [20] * 15 + [n - 300]):
        got = run(model, ids, parts, make_cache(model, policy, portable=False))
        assert difference(got, whole) < limit, parts
    if policy in ("exact", "window:400"):  # nothing has fallen out yet
        assert difference(whole, model(ids)) < MODEL_SPLIT


@pytest.mark.parametrize("policy", ["exact", "window:8+2", "int8"])
def test_evaluating_the_logits_leaves_no_graph_behind(policy, tmp_path):
    """A ring is written after its chunk has read it, and is a value all the same."""
    model = tiny_model(num_experts=0)
    cache, ids = make_cache(model, policy, portable=False), tokens(40)
    for part in parts_of(ids, [30, 1, 1, 8]):
        mx.eval(model(part, cache=cache))
        dot = tmp_path / "cache.dot"
        mx.export_to_dot(
            str(dot), *[a for entry in cache[:3] for a in entry.cache], *cache[3].state
        )
        assert "->" not in dot.read_text()


@pytest.mark.parametrize("policy", ["exact", "window:24+4", "int4"])
def test_mlx_lm_generates_through_any_policy(policy):
    """Plain mlx-lm steps on our caches, with its samplers: the tokens of our own decoding."""
    model = tiny_model()
    prompt = tokens(60, seed=4)[0]
    options = {
        "sampler": make_sampler(0.8, top_k=30, top_p=0.9),
        "logits_processors": make_logits_processors(repetition_penalty=1.1),
    }
    for sampling in ({}, options):
        mx.random.seed(3)
        step = generate_step(
            prompt, model, max_tokens=20, prompt_cache=model.make_cache(policy), **sampling
        )
        theirs = [token for token, _ in step]
        context = Context(model, policy=policy)
        context.prefill(prompt.tolist())
        mx.random.seed(3)
        assert list(context.decode(20, **sampling)) == theirs


def test_int8_stays_near_exact():
    """Within 1e-2 of the exact logits; int4 is cruder and says so by its name."""
    for changes in ({}, {"num_experts": 0}):
        model, ids = tiny_model(**changes), tokens(300)
        got = run(model, ids, [200, 100], make_cache(model, "int8"))
        assert 0 < difference(got, model(ids)) < INT8_LATENTS


@pytest.mark.parametrize(
    ("policy", "layers"),
    [("window:16+2", [1, 3]), ("window:16,int8", [1]), ("exact", [1, 2, 3, 4])],
)
def test_memory_is_constant_with_a_window_or_without_attention(policy, layers):
    full = [i for i in range(1, 5) if i not in layers]
    model = tiny_model(kda_layers=layers, full_attn_layers=full, num_experts=0)
    context = Context(model, policy=policy)
    sizes = set()
    for length in (1, 40, 300):
        context.prefill(tokens(length)[0].tolist(), step=64)
        list(context.decode(5))
        sizes.add(context.nbytes)
        layers = describe(model.args, policy, model.model.dtype)
        assert [one.bytes_at(7) for one in layers] == [entry.nbytes for entry in context.cache]
    assert len(sizes) == 1


@pytest.mark.parametrize("policy", ["exact", "int8", "int4", "window:64+4", "window:64,int8"])
def test_rows_have_the_bytes_that_the_policy_names(policy):
    made, x = layer(), inputs(70)
    _, cache = through(made, x, policy, [30, 40])
    formats = zip(Policy.parse(policy).row_formats(64, 32), (64, 32), strict=True)
    row = sum(form.row_bytes(width, mx.float32) for form, width in formats)
    assert cache.nbytes == cache.state[0].shape[2] * row


def test_blocks_grow_by_half_at_most():
    cache = LatentCache(Policy())
    rows = mx.random.normal((1, 1, 700, 8))
    for _ in range(60):
        seen = cache.absorb(rows, rows[..., :2])
        mx.eval(cache.state)
    sizes = [block[0].shape[2] for block in cache.storage.blocks]
    assert cache.offset == 42000 and sum(sizes) < 1.6 * cache.offset and len(sizes) < 14
    latents, shared = seen.dequantize()
    assert mx.array_equal(latents, mx.concatenate([rows] * 60, axis=2))
    assert mx.array_equal(shared, latents[..., :2])


def test_a_step_that_runs_ahead_writes_into_the_tail_only():
    """A buffer in flight is copied whole when it is written: that must be the short one."""
    cache = LatentCache(Policy())
    rows = mx.random.normal((1, 1, 5000, 8))
    cache.absorb(rows, rows[..., :2])
    settled = []
    for _ in range(2 * TAIL):
        cache.absorb(rows[:, :, :1], rows[:, :, :1, :2])
        settled.append(cache.storage.settled)
    touched = [
        at for at, (a, b) in enumerate(zip([5000, *settled], settled, strict=False)) if a != b
    ]
    assert len(touched) == 1 and cache.storage.tail[0].shape[2] == TAIL


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("window:0", "at least 1 token"),
        ("window:-3", "is not one of"),
        ("window", "is not one of"),
        ("window:8+", "is not one of"),
        ("int3", "is not one of"),
        ("int8,int4", "is not one of"),
        ("exact,int8", "is not one of"),
        ("window:4,window:8", "is not one of"),
        ("", "is not one of"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(text, words):
    with pytest.raises(UserError, match=words):
        Policy.parse(text)


def test_policies_have_one_spelling():
    for text in ("exact", "window:4096+16", "window:5", "int8", "window:5,int4"):
        assert str(Policy.parse(text)) == text
    assert str(Policy.parse(" INT8, window:5+0 ")) == "window:5,int8"


def test_a_width_that_cannot_be_packed_is_refused_by_name():
    with pytest.raises(UserError, match="kv_lora_rank of 20"):
        tiny_model(kv_lora_rank=20).make_cache("int8")
    # without attention layers there is nothing to pack
    tiny_model(kda_layers=[1, 2, 3, 4], full_attn_layers=[], kv_lora_rank=20).make_cache("int8")
