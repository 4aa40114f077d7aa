"""Logits of transformers and FLA (PyTorch, float64) against the models loaded from their files."""

import json
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from helpers.paths import FLA_GOLDENS, GOLDENS
from helpers.tiny import difference, run, stock_model
from mlx.utils import tree_flatten, tree_map
from tolerances import GOLDEN, LAYER_HALF, STOCK

from mlx_kda.convert import convert
from mlx_kda.models import load_model, read_config
from mlx_kda.models.hybrid import Model
from mlx_kda.models.hybrid_config import KDA, MLA, MOE
from mlx_kda.weights.source import open_source

KERNEL_SIZES = ["hub-head-64", "hub-wide-head", "native-head-32"]
KIMI = sorted(path.name for path in GOLDENS.iterdir())
FLA = sorted(path.name for path in FLA_GOLDENS.iterdir())
FOLDERS = {path.name: path for path in (*GOLDENS.iterdir(), *FLA_GOLDENS.iterdir())}
CONFIGS = {n: json.loads((path / "config.json").read_text()) for n, path in FOLDERS.items()}
# mlx-lm fills masked expert groups with 0.0 and so picks experts from them where biased scores
# are negative.
STOCK_AGREES = [name for name in KIMI if "groups" not in name]
OTHER_EPS = [name for name in KIMI if CONFIGS[name]["rms_norm_eps"] != 1e-6]


class Golden(NamedTuple):
    """A model widened to float32, its config, and (tokens [1, T], logits [T, vocab]) of prompts."""

    model: Model
    config: dict
    prompts: list[tuple[mx.array, np.ndarray]]


def _load(name: str, folder=None) -> Golden:
    model = load_model(folder or FOLDERS[name])
    wide = lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p  # noqa: E731
    model.update(tree_map(wide, model.parameters()))
    data = np.load(FOLDERS[name] / "golden.npz")
    parts = np.split(np.arange(data["lengths"].sum()), np.cumsum(data["lengths"])[:-1])
    prompts = [(mx.array(data["tokens"][i])[None], data["logits"][i]) for i in parts]
    return Golden(model, CONFIGS[name], prompts)


@pytest.fixture(scope="module", params=[*KIMI, *FLA])
def golden(request):
    return _load(request.param)


def test_the_goldens_differ_where_it_matters():
    kimi, fla = ([read_config(CONFIGS[name]) for name in names] for names in (KIMI, FLA))
    assert len(kimi) >= 6
    assert {"linear_attn_config" in CONFIGS[name] for name in KIMI} == {True, False}
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
        assert len({getattr(config, field) for config in kimi}) > 1, field
    assert any(MOE not in config.mlp_layer_types for config in kimi)
    assert all({KDA, MLA} == set(config.layer_types) for config in kimi)
    shapes = {(c.linear_num_heads, *c.linear_state_shape) for c in fla}
    assert any(Hv > H for H, Hv, _, _ in shapes)
    assert any(Dv > Dk for _, _, Dv, Dk in shapes) and any(Dv < Dk for _, _, Dv, Dk in shapes)
    for field in (
        "allow_neg_eigval",
        "tie_word_embeddings",
        "linear_conv_kernel_dim",
        "rms_norm_eps",
        "intermediate_size",
    ):
        assert len({getattr(c, field) for c in fla}) > 1, field
    assert {c.gate_lower_bound for c in fla} == {None, -3.0, -5.0}


def test_prefill_in_one_go(golden):
    for tokens, logits in golden.prompts:
        assert difference(golden.model(tokens)[0], logits) < GOLDEN
        last = golden.model(tokens, last_only=True)
        assert last.shape == (1, 1, logits.shape[1])
        assert difference(last[0], logits[-1:]) < GOLDEN


def test_token_by_token(golden):
    for tokens, logits in golden.prompts[1:]:
        steps = run(golden.model, tokens, [1] * tokens.shape[1])
        assert difference(steps[0], logits) < GOLDEN


@pytest.mark.parametrize("parts", [[64, 6], [1, 69], [2, 3, 5, 7, 53], [16, 17, 1, 1, 31, 4]])
def test_mixed_splits(golden, parts):
    tokens, logits = golden.prompts[0]
    assert difference(run(golden.model, tokens, parts)[0], logits) < GOLDEN


@pytest.mark.parametrize("name", [*KERNEL_SIZES, *(n for n in FLA if n != "odd-heads")])
@pytest.mark.parametrize("parts", [[70], [64, 6], [17, 16, 9, 8, *[1] * 20]])
def test_the_kernels_end_to_end(name, parts):
    """The same logits with every KDA layer computed by the Metal kernels, in the checked emulator.

    70 tokens go by chunks, 9 and 16 by the recurrent kernel, 8 and fewer by the decode kernel.
    """
    model, _, prompts = _load(name)
    model.runner = "emulator"
    assert model.kda_layers[0].choose(1, mx.float32).kernel == "kda_decode"
    tokens, logits = prompts[0]
    assert difference(run(model, tokens, parts)[0], logits[: sum(parts)]) < GOLDEN


def test_heads_without_a_kernel_go_by_operations():
    """Heads of 10 channels: the reason names the size, and the logits are right all the same."""
    model, _, prompts = _load("odd-heads")
    model.runner = "emulator"
    choice = model.kda_layers[0].choose(1, mx.float32)
    assert choice.kernel is None and "Dk = 10" in choice.reason
    assert difference(model(prompts[0][0])[0], prompts[0][1]) < GOLDEN


# --- Kimi Linear


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("name", KIMI)
def test_either_form_of_mla(name, form):
    model, _, prompts = _load(name)
    for layer in model.layers:
        if not layer.is_linear:
            layer.self_attn.form = form
    tokens, logits = prompts[0]
    assert difference(run(model, tokens, [64, 6])[0], logits) < GOLDEN


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


# --- FLA's pure KDA models


@pytest.mark.parametrize("name", FLA)
def test_a_converted_folder_gives_the_same_logits(name, tmp_path):
    """FLA's names, to ours on disk, to a model; its config reads as the source's does."""
    out = tmp_path / "out"
    report = convert(FOLDERS[name], out)
    assert any("no model_type kda" in warning for warning in report.warnings)
    written = json.loads((out / "config.json").read_text())
    assert read_config(written) == read_config(CONFIGS[name])
    names = {n.rpartition("model.layers.0.")[2] for n in open_source(out).tensors}
    assert "self_attn.f_a_proj.weight" in names and "self_attn.g_b_proj.bias" in names
    model, _, prompts = _load(name, out)
    for tokens, logits in prompts:
        assert difference(model(tokens)[0], logits) < GOLDEN
    again = convert(out, tmp_path / "again")
    assert again.tensors_out == report.tensors_out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["wide-values", "negative-tied"])
def test_half_precision(name, dtype):
    model, _, prompts = _load(name)
    kind, keep = getattr(mx, dtype), model.cast_predicate
    cast = [(n, p.astype(kind) if keep(n) else p) for n, p in tree_flatten(model.parameters())]
    model.load_weights(cast)
    tokens, logits = prompts[0]
    out = model(tokens)[0]
    assert out.dtype == kind
    assert difference(out.astype(mx.float32), logits) < 3 * LAYER_HALF[dtype]
