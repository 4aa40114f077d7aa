"""The model inside mlx-lm's machinery: loading, generation, batches, saved prompts, quantising."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.tiny import (
    difference,
    run,
    stock_model,
    tiny_config,
    tiny_model,
    tiny_weights,
    tokens,
    write_model,
)
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load_model as mlx_lm_load_model
from mlx_lm.utils import quantize_model
from tolerances import MODEL_SPLIT, STOCK

from mlx_kda.models import get_model_classes


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def greedy(model, prompt: list[int], n: int) -> list[int]:
    """n tokens by argmax, the whole sequence computed again for each, without a cache."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(mx.argmax(model(mx.array([ids]))[0, -1]).item())
    return ids[len(prompt) :]


def test_stock_mlx_lm_gives_the_same_logits_from_the_same_parameters(model):
    weights = dict(tree_flatten(model.parameters()))
    stock = stock_model(tiny_config(), weights)
    assert {k: v.shape for k, v in tree_flatten(stock.parameters())} == {
        k: v.shape for k, v in weights.items()
    }
    ids = tokens(50)
    assert difference(model(ids), stock(ids)) < STOCK
    assert difference(run(model, ids, [30, 1, 19]), run(stock, ids, [30, 1, 19])) < STOCK


def test_mlx_lm_loads_our_classes(tmp_path):
    config = tiny_config()
    weights = tiny_weights(config)
    write_model(tmp_path / "m", config, weights)
    loaded, _ = mlx_lm_load_model(tmp_path / "m", get_model_classes=get_model_classes)
    assert type(loaded).__module__ == "mlx_kda.models.hybrid"
    ids = tokens(20)
    assert mx.array_equal(loaded(ids), tiny_model()(ids))


def test_sanitize_leaves_its_own_result_alone(model):
    weights = dict(tree_flatten(model.parameters()))
    again = model.sanitize(weights)
    assert again.keys() == weights.keys()
    assert all(mx.array_equal(again[k], weights[k]) for k in weights)


def test_generate_step(model):
    prompt = tokens(41, seed=3)[0]
    got = [t for t, _ in generate_step(prompt, model, max_tokens=12, prefill_step_size=16)]
    assert got == greedy(model, prompt.tolist(), 12)


def test_batch_generator_with_rows_that_come_and_go(model):
    prompts = [tokens(n, seed=n)[0].tolist() for n in (5, 29, 1, 17)]
    lengths = [9, 4, 12, 7]
    batch = BatchGenerator(
        model, prefill_step_size=8, prefill_batch_size=2, completion_batch_size=3
    )
    uids = batch.insert(prompts, max_tokens=lengths)
    got = {uid: [] for uid in uids}
    while responses := batch.next_generated():
        for r in responses:
            got[r.uid].append(r.token)
    batch.close()
    for uid, prompt, n in zip(uids, prompts, lengths, strict=True):
        assert got[uid] == greedy(model, prompt, n)


@pytest.mark.parametrize("offset", [0, 1, 3, 20])
def test_a_saved_prompt_cache_continues_unchanged(model, tmp_path, offset):
    """Mlx-lm's save and load of the prompt cache at offsets 0, 1, 3 and 20."""
    ids = tokens(30)
    cache = make_prompt_cache(model)
    if offset:
        run(model, ids[:, :offset], cache=cache)
        save_prompt_cache(str(tmp_path / "p.safetensors"), cache)
        cache = load_prompt_cache(str(tmp_path / "p.safetensors"))
    assert [c.size() for c in cache if c.is_trimmable()] == [offset]
    got = run(model, ids[:, offset:], [4, 1, 25 - offset], cache)
    assert difference(got, model(ids)[:, offset:]) < MODEL_SPLIT
    if offset:
        assert [a.dtype for a in cache[0].cache] == [mx.float32] * 4


def test_quantising_by_mlx_lm_keeps_the_gates(model):
    """``quant_predicate`` keeps the gate path and gives the router 8 bits."""
    copy = tiny_model()
    copy, config = quantize_model(copy, tiny_config(), group_size=32, bits=6)
    scales = {k.rsplit(".", 1)[0] for k, _ in tree_flatten(copy.parameters()) if "scales" in k}
    assert scales
    for kept in ("b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"):
        assert not any(path.endswith(kept) for path in scales)
    routers = {k: v for k, v in config["quantization"].items() if k.endswith("mlp.gate")}
    assert len(routers) == 3 and all(v["bits"] == 8 for v in routers.values())
    json.dumps(config)
    ids = tokens(20)
    assert 1e-3 < difference(copy(ids), model(ids)) < 0.5


def test_casting_by_mlx_lm_keeps_what_must_stay_float32(model):
    """``cast_predicate`` spares A_log, dt_bias and the router's bias."""
    names = [k for k, _ in tree_flatten(model.parameters())]
    spared = {k.rsplit(".", 1)[-1] for k in names if not model.cast_predicate(k)}
    assert spared == {"A_log", "dt_bias", "e_score_correction_bias"}


def test_gradients_flow_to_every_parameter(model):
    """The trainer's need: a finite gradient for each parameter that is not an index."""
    ids = tokens(24)

    def loss(m):
        return nn.losses.cross_entropy(m(ids[:, :-1]), ids[:, 1:]).mean()

    value, grads = nn.value_and_grad(model, loss)(model)
    grads = dict(tree_flatten(grads))
    assert mx.isfinite(value).item()
    for name, g in grads.items():
        assert mx.all(mx.isfinite(g)).item(), name
        if "e_score_correction_bias" not in name:
            assert mx.any(g != 0).item(), name
