"""Folders that load, and those that are refused with one line."""

import json
import re
from pathlib import Path

import mlx.core as mx
import pytest
from helpers.tiny import (
    difference,
    run,
    stock_config,
    stock_model,
    tiny_config,
    tiny_model,
    tiny_weights,
    tokens,
    write_model,
)
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as mlx_lm_load_model
from mlx_lm.utils import quantize_model, save_config, save_model
from tolerances import MODEL_SPLIT, STOCK

from mlx_kda.errors import CheckpointError, UserError
from mlx_kda.models import load_model

KDA0, MLA3, MOE1 = (
    "model.layers.0.self_attn",
    "model.layers.3.self_attn",
    "model.layers.1.mlp",
)
IDS = tokens(20)


@pytest.fixture(scope="module")
def config():
    return tiny_config()


@pytest.fixture(scope="module")
def weights(config):
    return tiny_weights(config)


@pytest.fixture(scope="module")
def logits():
    return tiny_model()(IDS)


@pytest.mark.parametrize("shards", [1, 3])
def test_one_file_or_shards_with_an_index(tmp_path, config, weights, logits, shards):
    model = load_model(write_model(tmp_path / "m", config, weights, shards))
    assert mx.array_equal(model(IDS), logits)
    assert not model.training


# --- what stock mlx-lm wrote ---

MODES = {
    "affine-4-64": {"group_size": 64, "bits": 4},
    "affine-4-32": {"group_size": 32, "bits": 4},
    "affine-3-32": {"group_size": 32, "bits": 3},
    "affine-8-64": {"group_size": 64, "bits": 8},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}


def write_stock(folder: Path, config: dict, weights: dict, predicate=None, **settings):
    """Quantise with mlx-lm and save with mlx-lm; the model it quantised."""
    config = stock_config(config)
    model = stock_model(config, weights)
    model, config = quantize_model(model, config, quant_predicate=predicate, **settings)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return model


@pytest.mark.parametrize("mode", MODES)
def test_what_stock_mlx_lm_quantised_loads(tmp_path, config, weights, mode):
    stock = write_stock(tmp_path / "m", config, weights, **MODES[mode])
    model = load_model(tmp_path / "m")
    names = {k for k, _ in tree_flatten(model.parameters())}
    assert names == {k for k, _ in tree_flatten(stock.parameters())}
    assert difference(model(IDS), stock(IDS)) < STOCK
    assert difference(run(model, IDS, [11, 1, 8]), stock(IDS)) < STOCK


def test_scales_of_whole_experts_need_a_gpu(tmp_path, config, weights):
    """mlx-lm's nvfp4 with a global scale: MLX has no CPU code for it, which is said at the load."""
    settings = {**MODES["nvfp4"], "global_scale": True}
    stock = write_stock(tmp_path / "m", config, weights, **settings)
    if mx.default_device() == mx.cpu:
        with pytest.raises(CheckpointError, match="global scale"):
            load_model(tmp_path / "m")
    else:
        assert difference(load_model(tmp_path / "m")(IDS), stock(IDS)) < STOCK


def test_settings_of_each_layer_are_its_own(tmp_path, config, weights):
    """Mixed bits, groups and modes, as a predicate of mlx-lm writes them."""

    def predicate(path, _):
        if "q_proj" in path:
            return {"group_size": 32, "bits": 8}
        if "switch_mlp" in path:
            return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        return "k_proj" not in path

    stock = write_stock(tmp_path / "m", config, weights, predicate, group_size=64, bits=4)
    model = load_model(tmp_path / "m")
    assert model.layers[0].self_attn.q_proj.bits == 8
    assert model.layers[1].mlp.switch_mlp.up_proj.mode == "mxfp4"
    assert not hasattr(model.layers[0].self_attn.k_proj, "bits")
    assert model.layers[0].self_attn.v_proj.group_size == 64
    assert difference(model(IDS), stock(IDS)) < STOCK


def test_what_we_load_stock_loads_and_the_other_way_round(tmp_path, config, weights):
    folder = write_model(tmp_path / "m", config, weights, shards=2)
    stock, _ = mlx_lm_load_model(folder)
    model = load_model(folder)
    assert (
        dict(tree_flatten(stock.parameters())).keys()
        == dict(tree_flatten(model.parameters())).keys()
    )


def test_settings_that_contradict_the_shapes_are_refused(tmp_path, config, weights):
    write_stock(tmp_path / "m", config, weights, group_size=32, bits=4)
    path = tmp_path / "m" / "config.json"
    written = json.loads(path.read_text())
    written["quantization"][f"{KDA0}.q_proj"] = {"group_size": 64, "bits": 8}
    path.write_text(json.dumps(written))
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj"):
        load_model(tmp_path / "m")


# --- other layouts ---


@pytest.mark.parametrize(
    "settings",
    [
        {"group_size": 32, "bits": 4, "mode": "affine"},
        {"group_size": 32, "bits": 8, "mode": "affine"},
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        {"group_size": 16, "bits": 4, "mode": "nvfp4"},
        {"group_size": 32, "bits": 8, "mode": "mxfp8"},
        None,
    ],
    ids=lambda s: "plain" if s is None else f"{s['mode']}-{s['bits']}",
)
def test_kv_b_proj_in_one_piece_quantised_or_not(tmp_path, config, weights, settings):
    """As checkpoints of late 2025 hold it, affine with biases, mxfp4 and nvfp4 without."""
    keys, values = weights[f"{MLA3}.embed_q.weight"], weights[f"{MLA3}.unembed_out.weight"]
    whole = mx.concatenate([keys.swapaxes(-1, -2), values], axis=1)  # [H, nope + v, latents]
    whole = whole.reshape(-1, whole.shape[-1])
    old = {k: v for k, v in weights.items() if not k.startswith((f"{MLA3}.embed", f"{MLA3}.unemb"))}
    written = dict(config)
    if settings is None:
        old[f"{MLA3}.kv_b_proj.weight"] = whole
        rounded = whole
    else:
        parts = mx.quantize(whole, **settings)
        names = ("weight", "scales", "biases")[: len(parts)]
        old |= {f"{MLA3}.kv_b_proj.{n}": p for n, p in zip(names, parts, strict=True)}
        written["quantization"] = settings
        rounded = mx.dequantize(*parts, **settings, dtype=mx.float32)
    model = load_model(write_model(tmp_path / "m", written, old))

    rounded = rounded.reshape(4, 64, 32)
    new = dict(weights)
    new[f"{MLA3}.embed_q.weight"] = rounded[:, :32].swapaxes(-1, -2)
    new[f"{MLA3}.unembed_out.weight"] = rounded[:, 32:]
    want = load_model(write_model(tmp_path / "want", config, new))
    assert difference(model(IDS), want(IDS)) < MODEL_SPLIT


def test_the_router_bias_is_loaded_bitwise(tmp_path, config, weights):
    """In float32, whatever the dtype of the rest."""
    half = {
        k: v if k.endswith(("A_log", "dt_bias", "correction_bias")) else v.astype(mx.bfloat16)
        for k, v in weights.items()
    }
    model = load_model(write_model(tmp_path / "m", config, half))
    for i in (1, 2, 3):
        bias = model.layers[i].mlp.e_score_correction_bias
        want = weights[f"model.layers.{i}.mlp.e_score_correction_bias"]
        assert bias.dtype == mx.float32
        assert mx.array_equal(bias.view(mx.uint32), want.view(mx.uint32))


def test_every_tensor_is_accounted_for(tmp_path, config, weights):
    """A tensor that is missing, or not used, stops the load; test_weight_mapping has every kind."""
    rest = {k: v for k, v in weights.items() if k != f"{KDA0}.A_log"}
    with pytest.raises(CheckpointError, match=re.escape(f"lacks {KDA0}.A_log")):
        load_model(write_model(tmp_path / "less", config, rest))
    with pytest.raises(CheckpointError, match=r"does not use: visual\.patch_embed\.weight"):
        more = {**weights, "visual.patch_embed.weight": mx.zeros((3,))}
        load_model(write_model(tmp_path / "more", config, more))


# --- folders that are not a checkpoint ---

INDEX = "model.safetensors.index.json"


def change(path: Path, **keys) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def config_says(**keys):
    return lambda folder: change(folder / "config.json", **keys)


def config_is(text: str):
    return lambda folder: (folder / "config.json").write_text(text)


def truncated(keep: int):
    def cut(folder: Path) -> None:
        shard = folder / "model-00003-of-00003.safetensors"
        shard.write_bytes(shard.read_bytes()[:keep])

    return cut


def without(*patterns: str):
    def remove(folder: Path) -> None:
        for pattern in patterns:
            for path in folder.glob(pattern):
                path.unlink()

    return remove


def something_else(folder: Path) -> None:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (folder / "model-00001-of-00003.safetensors").write_bytes(text)


def index_says(name: str, file: str):
    def lie(folder: Path) -> None:
        placed = json.loads((folder / INDEX).read_text())["weight_map"]
        change(folder / INDEX, weight_map=placed | {name: file})

    return lie


DAMAGE = [
    (without("model-00002*"), "model-00002-of-00003.safetensors"),
    (without("model-00002*", INDEX), "the checkpoint lacks"),
    (without("model*"), "safetensors"),
    *((truncated(keep), "model-00003-of-00003.safetensors") for keep in (0, 4, 100, -1, -1000)),
    (something_else, "model-00001-of-00003.safetensors"),
    (index_says("model.norm.weight", "../outside.safetensors"), "outside the folder"),
    (index_says("model.extra.weight", "model-00001-of-00003.safetensors"), "model.extra.weight"),
    (without("config.json"), "config.json"),
    *((config_is(text), "config.json") for text in ("", "{", "[]", '"kimi_linear"', "\x00")),
    *((config_says(model_type=k), f"model_type {k!r}") for k in ("llama", "kimi_k3", 3)),
    (config_says(model_type=None), "no model_type"),
    (config_says(mla_use_nope=False), "mla_use_nope"),
    *(
        (config_says(quantization_config={"quant_method": method}), method)
        for method in ("compressed-tensors", "fp8", "awq")
    ),
]


@pytest.mark.parametrize(("damage", "word"), DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path, config, weights, damage, word):
    folder = write_model(tmp_path / "m", config, weights, shards=3)
    damage(folder)
    with pytest.raises(UserError) as caught:
        load_model(folder)
    assert word in str(caught.value) and "\n" not in str(caught.value)


def test_no_such_folder_and_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    for name in ("none", "file"):
        with pytest.raises(UserError, match=name):
            load_model(tmp_path / name)


def test_nothing_in_the_folder_is_executed(tmp_path, config, weights):
    """``auto_map``, ``model_file`` and stray modules are ignored."""
    folder = write_model(tmp_path / "m", config, weights)
    change(
        folder / "config.json",
        auto_map={"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
        model_file="modeling_kimi.py",
    )
    for name in ("modeling_kimi.py", "configuration_kimi.py", "__init__.py", "conftest.py"):
        (folder / name).write_text("raise SystemExit('executed')\n")
    assert load_model(folder)(IDS).shape == (1, 20, 128)
