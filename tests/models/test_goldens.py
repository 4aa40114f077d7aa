"""Logits of transformers (PyTorch, float64) against the model loaded from the same files."""

import json

import mlx.core as mx
import numpy as np
import pytest
from helpers.paths import GOLDENS
from helpers.tiny import difference, run, stock_model
from mlx.utils import tree_flatten, tree_map
from tolerances import GOLDEN, STOCK

from mlx_kda.models import load_model
from mlx_kda.models.hybrid_config import KDA, MLA, MOE
from mlx_kda.models.kimi_linear import KimiLinearConfig

FOLDER = GOLDENS
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
# mlx-lm fills masked expert groups with 0.0 and so picks experts from them where biased scores
# are negative.
STOCK_AGREES = [name for name in NAMES if "groups" not in name]


OTHER_EPS = [
    name
    for name in NAMES
    if json.loads((FOLDER / name / "config.json").read_text())["rms_norm_eps"] != 1e-6
]


@pytest.fixture(scope="module", params=NAMES)
def golden(request):
    return _load(request.param)


def _load(name):
    """(model widened to float32, config, [(tokens [1, T], logits [T, vocab])])."""
    model = load_model(FOLDER / name)
    model.update(tree_map(lambda p: p.astype(mx.float32), model.parameters()))
    config = json.loads((FOLDER / name / "config.json").read_text())
    data = np.load(FOLDER / name / "golden.npz")
    ends = np.cumsum(data["lengths"])
    starts = ends - data["lengths"]
    prompts = [
        (mx.array(data["tokens"][a:b])[None], data["logits"][a:b])
        for a, b in zip(starts, ends, strict=True)
    ]
    return model, config, prompts


def test_the_goldens_differ_where_it_matters():
    configs = [json.loads((FOLDER / name / "config.json").read_text()) for name in NAMES]
    read = [KimiLinearConfig.from_dict(config) for config in configs]
    assert len(read) >= 6
    assert {"linear_attn_config" in config for config in configs} == {True, False}
    for field in (
        "layer_types",
        "mlp_layer_types",
        "hidden_size",
        "linear_num_heads",
        "linear_head_dim",
        "linear_conv_kernel_dim",
        "num_attention_heads",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "kv_lora_rank",
        "num_experts",
        "num_experts_per_token",
        "num_expert_group",
        "num_shared_experts",
        "moe_renormalize",
        "rms_norm_eps",
    ):
        assert len({getattr(config, field) for config in read}) > 1, field
    assert any(MOE not in config.mlp_layer_types for config in read)
    assert all({KDA, MLA} == set(config.layer_types) for config in read)
    assert sum(f.stat().st_size for f in FOLDER.rglob("*") if f.is_file()) < 3e6


def test_prefill_in_one_go(golden):
    model, _, prompts = golden
    for tokens, logits in prompts:
        assert difference(model(tokens)[0], logits) < GOLDEN


def test_token_by_token(golden):
    model, _, prompts = golden
    for tokens, logits in prompts:
        assert difference(run(model, tokens, [1] * tokens.shape[1])[0], logits) < GOLDEN


@pytest.mark.parametrize("parts", [[64, 6], [1, 69], [2, 3, 5, 7, 53], [16, 17, 1, 1, 31, 4]])
def test_mixed_splits(golden, parts):
    model, _, prompts = golden
    tokens, logits = prompts[0]
    assert difference(run(model, tokens, parts)[0], logits) < GOLDEN


def test_the_last_row_alone(golden):
    model, _, prompts = golden
    for tokens, logits in prompts:
        last = model(tokens, last_only=True)
        assert last.shape == (1, 1, logits.shape[1])
        assert difference(last[0], logits[-1:]) < GOLDEN


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_either_form_of_mla(golden, form):
    model, _, prompts = golden
    for layer in model.layers:
        if not layer.is_linear:
            layer.self_attn.form = form
    try:
        tokens, logits = prompts[0]
        assert difference(run(model, tokens, [64, 6])[0], logits) < GOLDEN
    finally:
        for layer in model.layers:
            if not layer.is_linear:
                layer.self_attn.form = "auto"


@pytest.mark.parametrize("name", OTHER_EPS)
def test_the_eps_of_the_latents_shows(name):
    """With rms_norm_eps in the norm of the latents, as mlx-lm has it, the logits are wrong."""
    model, config, prompts = _load(name)
    tokens, logits = prompts[0]
    assert model.args.latent_norm_eps == 1e-6
    for layer in model.layers:
        if not layer.is_linear:
            layer.self_attn.kv_a_layernorm.eps = config["rms_norm_eps"]
    assert difference(model(tokens)[0], logits) > 10 * GOLDEN


@pytest.mark.parametrize("name", STOCK_AGREES)
def test_stock_mlx_lm_gives_the_same_logits(name):
    model, config, prompts = _load(name)
    tokens, logits = prompts[0]
    weights = dict(tree_flatten(model.parameters()))
    stock = stock_model(config, weights)
    assert difference(stock(tokens)[0], logits) < STOCK
    assert difference(model(tokens), stock(tokens)) < STOCK


KERNEL_SIZES = ["hub-head-64", "hub-wide-head", "native-head-32"]


@pytest.mark.parametrize("name", KERNEL_SIZES)
@pytest.mark.parametrize("parts", [[70], [64, 6], [17, 16, 9, 8, *[1] * 20]])
def test_the_kernels_end_to_end(name, parts):
    """The same logits with every KDA layer computed by the Metal kernels, in the checked emulator.

    70 tokens go by chunks, 9 and 16 by the recurrent kernel, 8 and fewer by the decode kernel.
    """
    model, _, prompts = _load(name)
    model.runner = "emulator"
    assert model.kda_layers[0].choose(1, mx.float32).kernel == "kda_decode"
    tokens, logits = prompts[0]
    assert difference(run(model, tokens, parts)[0], logits) < GOLDEN
