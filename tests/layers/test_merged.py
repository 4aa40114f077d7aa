"""Maps of one input as one product: same results, same arrays, no trace once replaced."""

import launches
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers.tiny import difference, run, tiny_model
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear
from tolerances import MODEL_SPLIT

from mlx_kda.layers.merged import Bundle

KINDS = {
    "float32": None,
    "affine 4": {"bits": 4, "group_size": 32},
    "affine 8": {"bits": 8, "group_size": 64},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}


def maps(sizes=(48, 32, 48), width=64, packing=None, seed=0):
    mx.random.seed(seed)
    layers = [nn.Linear(width, n, bias=False) for n in sizes]
    return [layer if packing is None else layer.to_quantized(**packing) for layer in layers]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [1, 8, 9, 40])
def test_a_bundle_is_its_maps(kind, T):
    layers = maps(packing=KINDS[kind])
    x = mx.random.normal((2, T, 64))[:1]
    want = [layer(x) for layer in layers]
    bundle = Bundle(layers)
    assert len(bundle.groups) == 1
    for got, y in zip(bundle(layers, x), want, strict=True):
        assert np.allclose(np.array(got), np.array(y), rtol=1e-5, atol=1e-5)


def test_the_maps_become_views_and_keep_their_values():
    layers = maps()
    before = [np.array(layer.weight) for layer in layers]
    bundle = Bundle(layers)
    mx.eval([layer.weight for layer in layers])
    for layer, weight in zip(layers, before, strict=True):
        assert np.array_equal(np.array(layer.weight), weight)
    # The merged map is what they are views of: nothing is held twice.
    rows = sum(w.shape[0] for w in before)
    assert bundle.groups[0].whole["weight"].shape == (rows, 64)


def test_merging_holds_no_second_copy():
    layers = maps(sizes=(1024, 1024), width=1024)
    mx.eval([layer.weight for layer in layers])
    mx.clear_cache()
    before = mx.get_active_memory()
    bundle = Bundle(layers)
    mx.clear_cache()
    assert mx.get_active_memory() - before < 1e6, bundle


@pytest.mark.parametrize("change", ["another map", "another weight", "other scales"])
def test_a_map_that_is_replaced_is_applied_itself(change):
    packing = KINDS["affine 4"] if change == "other scales" else None
    layers = maps(packing=packing)
    bundle = Bundle(layers)
    other = maps(packing=packing, seed=1)[1]
    if change == "another map":
        layers[1] = other
    elif change == "another weight":
        layers[1].weight = other.weight
    else:
        layers[1].scales = other.scales
    x = mx.random.normal((1, 1, 64))
    for got, layer in zip(bundle(layers, x), layers, strict=True):
        assert mx.array_equal(got, layer(x))
    assert not bundle.groups  # the maps own their arrays again


def test_only_maps_of_one_kind_are_merged():
    plain, packed = maps(), maps(packing=KINDS["affine 4"])
    biased = nn.Linear(64, 8)
    half = nn.Linear(64, 8, bias=False)
    half.set_dtype(mx.float16)
    layers = [plain[0], packed[0], biased, plain[1], half, packed[1]]
    bundle = Bundle(layers)
    assert sorted(len(group.layers) for group in bundle.groups) == [2, 2]
    x = mx.random.normal((1, 1, 64))
    for got, layer in zip(bundle(layers, x), layers, strict=True):
        assert np.allclose(np.array(got), np.array(layer(x)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packing", [None, {"bits": 4, "group_size": 32}])
def test_a_merged_model_gives_the_same_logits(packing):
    plain, merged = tiny_model(), tiny_model()
    if packing:
        for model in (plain, merged):
            nn.quantize(model, **packing)
    names = [name for name, _ in tree_flatten(merged.parameters())]
    merged.merge()
    assert [name for name, _ in tree_flatten(merged.parameters())] == names
    ids = mx.array(np.random.default_rng(0).integers(0, 128, (1, 30)))
    parts = [20, 1, 3, 1, 5]
    want = run(plain, ids, parts)
    assert difference(run(merged, ids, parts), want) < MODEL_SPLIT
    merged.merge(False)
    assert mx.array_equal(run(merged, ids, parts), want)


def test_an_adapter_put_in_later_is_used():
    model = tiny_model()
    model.merge()
    ids = mx.array([[3]])
    before = model(ids)
    attn = model.layers[0].self_attn
    attn.q_proj = LoRALinear.from_base(attn.q_proj)
    assert difference(model(ids), before) < MODEL_SPLIT  # an adapter begins as nothing
    attn.q_proj.lora_b = mx.random.normal(attn.q_proj.lora_b.shape)
    assert difference(model(ids), before) > 1e-3


def test_a_decode_step_of_the_48b_asks_for_600_launches_at_most():
    """Counted from the graph; mlx-lm's in the same way."""
    rows = {row["candidate"]: row["launches"] for row in launches.rows(4)}
    assert rows["ours"] <= 600
    assert rows["mlx-lm"] > 2 * rows["ours"]
    assert rows["ours"] < rows["ours, maps one by one"] < rows["mlx-lm"]
