"""Folders that load, and those that are refused with one line."""

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
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


# --- layouts of other times and hands ---


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
def test_e2_kv_b_proj_in_one_piece_quantised_or_not(tmp_path, config, weights, settings):
    """Case E2: as late-2025 checkpoints hold it, affine with biases, mxfp4 and nvfp4 without."""
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


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 1, 4, 1)])
@pytest.mark.parametrize("padding", [0, 1, 4, 124])
def test_e5_shapes_of_a_log(tmp_path, config, weights, logits, shape, padding):
    """Case E5: [H], [H, 1], [1, 1, H, 1], or with zeros beyond the last head."""
    changed = dict(weights)
    a_log = weights[f"{KDA0}.A_log"].reshape(shape)
    axis = shape.index(4)
    if padding:
        zeros = mx.zeros([padding if n == 4 else n for n in shape])
        a_log = mx.concatenate([a_log, zeros], axis=axis)
    changed[f"{KDA0}.A_log"] = a_log
    model = load_model(write_model(tmp_path / "m", config, changed))
    assert model.layers[0].self_attn.A_log.shape == (1, 1, 4, 1)
    assert mx.array_equal(model(IDS), logits)


@pytest.mark.parametrize("tail", [1.0, -1e-30, float("nan"), float("inf")])
def test_e5_a_tail_of_a_log_that_is_not_zero_is_an_error(tmp_path, config, weights, tail):
    """Case E5: values beyond the last head that are not zero mean that the head count is wrong."""
    changed = dict(weights)
    values = np.array([*weights[f"{KDA0}.A_log"].reshape(-1).tolist(), 0.0, tail, 0.0, 0.0])
    changed[f"{KDA0}.A_log"] = mx.array(values.astype(np.float32))
    with pytest.raises(CheckpointError, match="A_log"):
        load_model(write_model(tmp_path / "m", config, changed))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_e5_shapes_of_dt_bias(tmp_path, config, weights, dtype):
    """Case E5: [H * D] or [H, D], widened to float32 where it was stored narrower; [H] refused."""
    changed = {k: v.astype(dtype) if k.endswith("dt_bias") else v for k, v in weights.items()}
    want = load_model(write_model(tmp_path / "flat", config, changed))
    changed[f"{KDA0}.dt_bias"] = changed[f"{KDA0}.dt_bias"].reshape(4, 32)
    model = load_model(write_model(tmp_path / "rows", config, changed))
    assert model.layers[0].self_attn.dt_bias.dtype == mx.float32
    assert mx.array_equal(model(IDS), want(IDS))
    changed[f"{KDA0}.dt_bias"] = changed[f"{KDA0}.dt_bias"][:, 0]
    with pytest.raises(CheckpointError, match="dt_bias"):
        load_model(write_model(tmp_path / "heads", config, changed))


def test_d5_the_router_bias_is_loaded_bitwise(tmp_path, config, weights):
    """Case D5: float32 and bit for bit, whatever the dtype of the rest."""
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


# --- every tensor accounted for ---

EVERY_KIND = [
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.2.input_layernorm.weight",
    "model.layers.3.post_attention_layernorm.weight",
    "model.layers.0.mlp.up_proj.weight",
    f"{KDA0}.A_log",
    f"{KDA0}.dt_bias",
    f"{KDA0}.f_a_proj.weight",
    f"{KDA0}.q_conv.conv.weight",
    f"{KDA0}.o_norm.weight",
    f"{MLA3}.embed_q.weight",
    f"{MLA3}.unembed_out.weight",
    f"{MLA3}.kv_a_layernorm.weight",
    f"{MOE1}.gate.weight",
    f"{MOE1}.e_score_correction_bias",
    f"{MOE1}.switch_mlp.down_proj.weight",
    f"{MOE1}.shared_experts.up_proj.weight",
]


def test_d7_the_list_names_every_kind(weights):
    modules = {name.rsplit(".", 1)[0].split(".")[-1] for name in weights if "proj" not in name}
    assert {name.rsplit(".", 1)[0].split(".")[-1] for name in EVERY_KIND} >= modules - {"conv"}
    assert set(EVERY_KIND) <= weights.keys()


@pytest.mark.parametrize("name", EVERY_KIND)
def test_d7_a_parameter_left_at_its_initial_value_is_an_error(tmp_path, config, weights, name):
    """Case D7: whichever tensor is missing, the load fails and names it."""
    rest = {k: v for k, v in weights.items() if k != name}
    # experts may be missing under the name of either layout
    path = name.replace("mlp.switch_mlp.down_proj", "block_sparse_moe.experts.0.w2")
    with pytest.raises(CheckpointError, match=re.escape(path.rsplit(".", 1)[0])) as error:
        load_model(write_model(tmp_path / "m", config, rest))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        f"{KDA0}.q_proj.bias",
        f"{KDA0}.kv_b_proj.weight",
        f"{MLA3}.A_log",
        f"{MOE1}.switch_mlp.gate_proj.bias",
        "model.layers.4.input_layernorm.weight",
        "model.layers.0.mlp.gate.weight",
        "visual.patch_embed.weight",
        f"{KDA0}.k_proj.scales",
    ],
)
def test_d7_a_leftover_tensor_is_an_error(tmp_path, config, weights, name):
    """Case D7: whichever tensor is one too many, the load fails and names it."""
    with pytest.raises(CheckpointError, match=re.escape(name.rsplit(".", 1)[0])):
        load_model(write_model(tmp_path / "m", config, {**weights, name: mx.zeros((3,))}))


@pytest.mark.parametrize("name", EVERY_KIND)
def test_d7_a_wrong_shape_is_an_error(tmp_path, config, weights, name):
    changed = {**weights, name: mx.zeros((5, 3))}
    with pytest.raises(CheckpointError, match=re.escape(name.rsplit(".", 1)[0])):
        load_model(write_model(tmp_path / "m", config, changed))


def test_d7_tensors_that_are_dropped_are_dropped_by_name(tmp_path, config, weights, logits):
    extra = {
        "model.mtp.layers.0.weight": mx.zeros((2, 2)),
        f"{MLA3}.rotary_emb.inv_freq": mx.zeros((16,)),
    }
    model = load_model(write_model(tmp_path / "m", config, weights | extra))
    assert mx.array_equal(model(IDS), logits)


# --- folders that are no checkpoint ---


@pytest.fixture
def folder(tmp_path, config, weights):
    return write_model(tmp_path / "m", config, weights, shards=3)


def refused(folder: Path, *names: str) -> None:
    with pytest.raises(UserError) as error:
        load_model(folder)
    assert "\n" not in str(error.value)
    for name in names:
        assert name in str(error.value), (name, str(error.value))


def test_a_missing_shard(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "model-00002-of-00003.safetensors")


def test_a_missing_shard_without_an_index(folder):
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -1000])
def test_a_truncated_shard(folder, keep):
    shard = folder / "model-00003-of-00003.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:keep])
    refused(folder, shard.name)


def test_a_shard_that_is_something_else(folder):
    shard = folder / "model-00001-of-00003.safetensors"
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    refused(folder, shard.name)


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '"kimi_linear"', "\x00"])
def test_a_damaged_config(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, "config.json")


def test_no_weights(folder):
    for shard in folder.glob("model*"):
        shard.unlink()
    refused(folder, "safetensors")


def test_no_such_folder_and_a_file(tmp_path):
    refused(tmp_path / "none", "none")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "file")


@pytest.mark.parametrize("kind", ["llama", "kimi_k3", None, 3])
def test_an_unknown_model_type(folder, config, kind):
    (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    refused(folder, "no model_type" if kind is None else f"model_type {kind!r}")


def test_an_unbuilt_feature(folder, config):
    (folder / "config.json").write_text(json.dumps({**config, "mla_use_nope": False}))
    refused(folder, "mla_use_nope")


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8", "awq"])
def test_a_foreign_quantisation(folder, config, method):
    changed = {**config, "quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(changed))
    refused(folder, method)


def test_an_index_that_lies(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../outside.safetensors"
    path.write_text(json.dumps(index))
    refused(folder)
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    refused(folder)


def test_f6_nothing_in_the_folder_is_executed(folder, config):
    """Case F6: auto_map, model_file and stray modules are left alone."""
    changed = {
        **config,
        "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
        "model_file": "modeling_kimi.py",
    }
    (folder / "config.json").write_text(json.dumps(changed))
    for name in ("modeling_kimi.py", "configuration_kimi.py", "__init__.py", "conftest.py"):
        (folder / name).write_text("raise SystemExit('executed')\n")
    assert load_model(folder)(IDS).shape == (1, 20, 128)
    shutil.rmtree(folder)
