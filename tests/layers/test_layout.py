"""Weights laid out for the CPU's BLAS: the same numbers, and everything done to them later."""

from contextlib import nullcontext

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers.tiny import difference, run, tiny_config, tiny_model, tiny_weights, tokens, write_model
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model as mlx_lm_load
from mlx_lm.utils import save_model
from tolerances import MODEL_SPLIT, STOCK

from mlx_kda.layers import MLA, MLP, MoE, blas_layout
from mlx_kda.models import load_model

IDS = tokens(20)

pytestmark = pytest.mark.skipif(not blas_layout.applies(), reason="MLX's Linux CPU build only")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny_config()
    return write_model(tmp_path_factory.mktemp("m") / "m", config, tiny_weights(config))


@pytest.fixture
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def stored(folder):
    with blas_layout.as_stored():
        return load_model(folder)


def is_laid_out(weight: mx.array) -> bool:
    """Whether W^T is what lies row by row in memory: seen from NumPy's view of the same bytes."""
    strides = np.array(weight, copy=False).strides
    return strides[-2] == weight.itemsize < strides[-1]


def test_matrices_are_laid_out_and_what_does_not_gain_is_not(model, stored):
    kda, mla = (model.layers[i].self_attn for i in (0, 3))
    moe, dense = model.layers[1].mlp, model.layers[0].mlp
    assert isinstance(mla, MLA) and isinstance(moe, MoE) and isinstance(dense, MLP)
    gaining = (kda.q_proj, kda.o_proj, mla.q_proj, mla.unembed_out, dense.up_proj, moe.gate)
    experts = (moe.switch_mlp.gate_proj, moe.switch_mlp.down_proj, model.lm_head)
    for layer in (*gaining, *experts):
        assert is_laid_out(layer.weight)
    for weight in (kda.q_conv.conv.weight, mla.embed_q.weight, model.model.embed_tokens.weight):
        assert not is_laid_out(weight)
    assert not is_laid_out(stored.layers[0].self_attn.o_proj.weight)


def test_names_shapes_and_numbers_stay(model, stored):
    laid, plain = (dict(tree_flatten(m.parameters())) for m in (model, stored))
    assert laid.keys() == plain.keys()
    for name, weight in laid.items():
        assert weight.shape == plain[name].shape and weight.dtype == plain[name].dtype
        assert mx.array_equal(weight, plain[name]), name
    for parts in ([20], [11, 1, 8]):
        assert difference(run(model, IDS, parts), run(stored, IDS, parts)) < MODEL_SPLIT


def test_the_head_of_tied_embeddings_is_laid_out(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    weights = {k: w for k, w in tiny_weights(config).items() if not k.startswith("lm_head")}
    model = load_model(write_model(tmp_path / "m", config, weights))
    assert is_laid_out(model.model.embed_tokens.weight)
    with blas_layout.as_stored():
        stored = load_model(tmp_path / "m")
    assert difference(model(IDS), stored(IDS)) < MODEL_SPLIT


def test_what_is_saved_is_read_by_all(tmp_path, model, stored):
    save_model(tmp_path, model)
    mx.save_safetensors(str(tmp_path / "again.safetensors"), dict(tree_flatten(model.parameters())))
    plain = dict(tree_flatten(stored.parameters()))
    for file in ("model.safetensors", "again.safetensors"):
        read = mx.load(str(tmp_path / file))
        assert all(mx.array_equal(read[name], weight) for name, weight in plain.items())


def test_weights_put_in_later_count(model, folder):
    other = {k: 1.5 * w for k, w in tiny_weights(tiny_config()).items() if "proj" in k}
    model.load_weights(list(other.items()), strict=False)
    plain, _ = mlx_lm_load(folder)
    plain.load_weights(list(other.items()), strict=False)
    assert difference(run(model, IDS, [19, 1]), plain(IDS)) < STOCK
    model.update(tree_map(lambda w: w, plain.parameters()))
    assert difference(run(model, IDS, [19, 1]), plain(IDS)) < STOCK


@pytest.mark.parametrize("packing", [{"bits": 4, "group_size": 32}, {"mode": "mxfp4"}])
def test_quantising_a_loaded_model_packs_the_same_words(model, stored, folder, packing):
    with blas_layout.as_stored():
        stored = load_model(folder)
    for each in (model, stored):
        nn.quantize(
            each, **packing, class_predicate=lambda _, m: type(m) in (nn.Linear, SwitchLinear)
        )
    laid, plain = (dict(tree_flatten(m.parameters())) for m in (model, stored))
    assert laid.keys() == plain.keys() and any(name.endswith("scales") for name in laid)
    assert all(mx.array_equal(laid[name], w) for name, w in plain.items())
    assert difference(run(model, IDS, [19, 1]), run(stored, IDS, [19, 1])) < MODEL_SPLIT


def test_gradients_and_a_step_of_training(folder):
    """The gradient has its weight's shape, and both models take the same steps."""
    losses = []
    for context in (blas_layout.as_stored, nullcontext):
        with context():
            model = load_model(folder)
        model.train()
        optimizer = optim.Adam(1e-3)

        def loss(model):
            return nn.losses.cross_entropy(model(IDS[:, :-1]), IDS[:, 1:]).mean()

        step = nn.value_and_grad(model, loss)
        taken = []
        for _ in range(3):
            value, gradients = step(model)
            optimizer.update(model, gradients)
            mx.eval(model.parameters(), optimizer.state)
            taken.append(value.item())
        losses.append(taken)
    assert losses[0][2] < losses[0][0]
    assert np.allclose(losses[0], losses[1], rtol=1e-4)


def test_16_bit_weights_stay_but_for_experts(tmp_path):
    """Their products are the same in both layouts; experts are computed in float32."""
    config = tiny_config()
    keep = ("A_log", "dt_bias", "correction_bias")
    half = {
        k: w if k.endswith(keep) else w.astype(mx.bfloat16) for k, w in tiny_weights(config).items()
    }
    model = load_model(write_model(tmp_path / "m", config, half))
    assert not is_laid_out(model.layers[0].self_attn.o_proj.weight.view(mx.uint16))
    assert is_laid_out(model.layers[1].mlp.switch_mlp.down_proj.weight.view(mx.uint16))
    with blas_layout.as_stored():
        stored = load_model(tmp_path / "m")
    assert mx.array_equal(model(IDS), stored(IDS))


def test_on_a_gpu_nothing_is_touched(monkeypatch, folder):
    with blas_layout.as_stored():
        model = load_model(folder)
    before = [w for _, w in tree_flatten(model.parameters())]
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    assert not blas_layout.applies()
    blas_layout.lay_out(model)
    assert all(a is b for a, (_, b) in zip(before, tree_flatten(model.parameters()), strict=True))
    keys = mx.zeros((2, 3))
    assert blas_layout.as_right_factor(keys) is keys


def test_no_more_than_one_weight_is_held_twice():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.args = tiny_model().args
            self.maps = [nn.Linear(512, 512, bias=False) for _ in range(16)]

    model = Stack()
    mx.eval(model.parameters())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    blas_layout.lay_out(model)
    assert is_laid_out(model.maps[15].weight)
    assert mx.get_peak_memory() - before < 1.5 * 512 * 512 * 4
    assert mx.get_active_memory() - before < 1e5


def test_a_map_that_leaves_its_bundle_is_laid_out_by_itself(model):
    """An adapter in the place of one map: the others, views until then, own fast arrays again."""
    attn = model.layers[0].self_attn
    before = model(IDS[:, :1])
    attn.q_proj = nn.Linear(*attn.q_proj.weight.shape[::-1], bias=False)
    attn.q_proj.weight = attn.k_proj.weight + 0
    model(IDS[:, :1])
    assert is_laid_out(attn.v_proj.weight)
    assert np.array(attn.v_proj.weight, copy=False).strides[-1] == 4 * attn.v_proj.weight.shape[0]
    assert difference(model(IDS[:, :1]), before) > 1e-4
