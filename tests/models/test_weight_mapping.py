"""Every tensor of a Kimi Linear checkpoint ends where it belongs, or is named in an error."""

import json
import re

import mlx.core as mx
import numpy as np
import pytest
from helpers.checkpoints import edit_json, read_all, same_bits, stock_logits
from helpers.paths import GOLDENS
from helpers.tiny import tiny_config, tiny_weights
from helpers.tiny_checkpoint import CONFIG, weights, write_checkpoint, write_weights
from tolerances import GOLDEN, STOCK

from mlx_kda.convert import convert
from mlx_kda.errors import CheckpointError
from mlx_kda.models import load_model, map_checkpoint
from mlx_kda.models.kimi_linear import KimiLinearConfig
from mlx_kda.weights.safetensors import Spec

CASES = sorted(GOLDENS.iterdir())
LINEAR = CONFIG["linear_attn_config"]
HEADS, DIM = LINEAR["num_heads"], LINEAR["head_dim"]
EXPERTS = CONFIG["num_experts"]
KDA = "model.layers.0.self_attn"
MLA = "model.layers.3.self_attn"
HUB_MOE = "model.layers.1.block_sparse_moe"
MLX_MOE = "model.layers.1.mlp"
FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias")


def mapped(tensors: dict[str, mx.array], **config) -> dict[str, mx.array]:
    """The model's tensors, made from those of a checkpoint."""
    specs = {name: Spec(tuple(w.shape), w.dtype) for name, w in tensors.items()}
    result = {}
    for step in map_checkpoint(CONFIG | config, specs)[1].steps:
        result |= step.run(tensors.__getitem__)
    return result


def refused(tensors: dict[str, mx.array], *words: str, **config) -> None:
    """The mapping fails in one line that holds all the words."""
    with pytest.raises(CheckpointError) as caught:
        mapped(tensors, **config)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


# --- whole checkpoints through a conversion


def expected(name: str, source: dict[str, mx.array], config: dict) -> tuple[mx.array, list[str]]:
    """What a converted tensor must hold, made from the source's tensors, and their names."""
    hub = name.replace(".mlp.", ".block_sparse_moe.")
    if name in source:
        names = [name]
        return source[name], names
    if "_conv.conv." in name:
        names = [name.replace("_conv.conv.", "_conv1d.")]
        return source[names[0]].swapaxes(1, 2), names
    if "embed_q" in name or "unembed_out" in name:
        names = [re.sub(r"(embed_q|unembed_out)", "kv_b_proj", name)]
        nope = config["qk_nope_head_dim"]
        heads = source[names[0]].reshape(
            config["num_attention_heads"], nope + config["v_head_dim"], config["kv_lora_rank"]
        )
        return (heads[:, :nope].swapaxes(1, 2) if "embed_q" in name else heads[:, nope:]), names
    if "switch_mlp" in name:
        part = {"gate": "w1", "up": "w3", "down": "w2"}[name.split(".")[-2].split("_")[0]]
        base = hub.partition("switch_mlp")[0]
        names = [f"{base}experts.{i}.{part}.weight" for i in range(config["num_experts"])]
        return mx.stack([source[n] for n in names]), names
    if name.endswith("e_score_correction_bias"):
        names = [hub.replace("e_score", "gate.e_score")]
        return source[names[0]], names
    return source[hub], [hub]


@pytest.mark.parametrize("golden", CASES, ids=lambda path: path.name)
def test_every_tensor_and_the_config_arrive(golden, tmp_path):
    """What save_pretrained wrote, in both dialects, tensor by tensor and bit for bit."""
    source, config = read_all(golden), json.loads((golden / "config.json").read_text())
    report = convert(golden, tmp_path / "out")
    result = read_all(tmp_path / "out")
    most = result["model.embed_tokens.weight"].dtype
    taken: set[str] = set()
    for name, array in result.items():
        origin, names = expected(name, source, config)
        taken |= set(names)
        dtype = mx.float32 if name.endswith(FLOAT32) else most
        assert same_bits(array, origin.astype(dtype)), name
    assert taken == set(source)
    assert report.dropped == {}
    assert (report.tensors_in, report.tensors_out) == (len(source), len(result))
    assert report.bytes_out == sum(array.nbytes for array in result.values())
    assert report.parameters == sum(array.size for array in source.values())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert KimiLinearConfig.from_dict(written) == KimiLinearConfig.from_dict(config)
    assert not {"auto_map", "layer_types", "mlp_layer_types"} & written.keys()
    assert written["torch_dtype"] == ("float32" if golden.name == "hub-wide-head" else "bfloat16")


@pytest.mark.parametrize("golden", CASES, ids=lambda path: path.name)
def test_converted_goldens_give_the_same_logits(golden, tmp_path):
    """Here against transformers' float64; in stock mlx-lm against stock mlx-lm's own loader."""
    convert(golden, tmp_path / "out", dtype="float32")
    truth = np.load(golden / "golden.npz")
    count = int(truth["lengths"][0])
    logits = load_model(tmp_path / "out")(mx.array(truth["tokens"][:count])[None])[0]
    wanted = mx.array(truth["logits"][:count])
    assert (mx.linalg.norm(logits - wanted) / mx.linalg.norm(wanted)).item() <= GOLDEN
    tokens = mx.array(truth["tokens"])[None, :40]
    logits = stock_logits(tmp_path / "out", tokens)
    assert mx.isfinite(logits).all().item()
    # stock mlx-lm reads the hub's names itself, but neither the other dialect nor its names
    if golden.name.startswith("hub"):
        stock = stock_logits(golden, tokens, mx.float32)
        assert mx.abs(logits - stock).max().item() <= STOCK * mx.abs(stock).max().item()


def test_converting_what_was_converted_changes_nothing(tmp_path):
    """An MLX folder is a source too: the same tensors and config come out."""
    convert(CASES[0], tmp_path / "once")
    convert(tmp_path / "once", tmp_path / "twice")
    once, twice = read_all(tmp_path / "once"), read_all(tmp_path / "twice")
    assert once.keys() == twice.keys()
    assert all(same_bits(once[name], twice[name]) for name in once)
    index = "model.safetensors.index.json"
    assert (tmp_path / "once" / index).read_text() == (tmp_path / "twice" / index).read_text()
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("once", "twice")]
    assert [config.pop("mlx_kda")["source"] for config in configs] == [CASES[0].name, "once"]
    assert configs[0] == configs[1]


def test_moe_layers_that_no_rule_names_are_kept_and_warned_of(tmp_path):
    """Dense layers in the middle: the hub's dialect cannot say so, the other one can."""
    source = write_checkpoint(tmp_path / "source")
    tensors = weights()
    for name in [k for k in tensors if k.startswith("model.layers.2.block_sparse_moe")]:
        del tensors[name]
    for part in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"model.layers.2.mlp.{part}.weight"] = tensors[f"model.layers.0.mlp.{part}.weight"]
    write_weights(source, tensors)
    edit_json(source / "config.json", mlp_layer_types=["dense", "sparse", "dense", "sparse"])
    report = convert(source, tmp_path / "out")
    # every second layer from 1 on is no multiple of 2
    assert any("stock mlx-lm" in warning for warning in report.warnings)
    assert convert(tmp_path / "out", tmp_path / "again").parameters == report.parameters


def test_tensors_left_out_on_purpose_are_reported(tmp_path):
    """Prediction heads and rotary tables are dropped by name, with the reason."""
    source = write_checkpoint(tmp_path / "source")
    extra = {
        "model.mtp.layers.0.weight": mx.zeros((2,)),
        f"{MLA}.rotary_emb.inv_freq": mx.zeros((4,)),
    }
    write_weights(source, weights() | extra)
    report = convert(source, tmp_path / "out")
    assert set(report.dropped) == set(extra)
    assert all(report.dropped.values())
    assert not set(extra) & set(read_all(tmp_path / "out"))


# --- names and order


def test_experts_are_stacked_in_numeric_order():
    """Expert 10 comes after 9, not after 1; each expert is told apart by its value."""
    tensors = weights()
    shape = tensors[f"{HUB_MOE}.experts.0.w1.weight"].shape
    count = 12
    for name in [name for name in tensors if ".experts." in name and "shared" not in name]:
        base = tensors.pop(name)
        stem, tail = re.fullmatch(r"(.*\.experts\.)\d+(\..*)", name).groups()
        for i in range(count):
            tensors[f"{stem}{i}{tail}"] = mx.full(base.shape, float(i))
    for layer in (1, 2, 3):
        moe = f"model.layers.{layer}.block_sparse_moe.gate"
        tensors[f"{moe}.weight"] = mx.zeros((count, CONFIG["hidden_size"]))
        tensors[f"{moe}.e_score_correction_bias"] = mx.zeros((count,))
    stack = mapped(tensors, num_experts=count)["model.layers.1.mlp.switch_mlp.gate_proj.weight"]
    assert stack.shape == (count, *shape)
    assert stack[:, 0, 0].tolist() == [float(i) for i in range(count)]


def test_both_names_of_dense_layers_are_taken():
    """The hub has mlp.*, save_pretrained block_sparse_moe.*, for the same dense layer."""
    tensors = weights()
    renamed = {
        k.replace("layers.0.mlp.", "layers.0.block_sparse_moe."): v for k, v in tensors.items()
    }
    plain, other = mapped(tensors), mapped(renamed)
    assert plain.keys() == other.keys()
    assert all(same_bits(plain[name], other[name]) for name in plain)


# --- nothing left over, nothing missing


def last_word(name: str) -> str:
    """The last part of a tensor's name that all layouts share; experts by their hub names."""
    word = re.sub(r"(1d|\.conv)?(\.weight)?$", "", name).rpartition(".")[2]
    hub = {"gate_proj": ".w1", "up_proj": ".w3", "down_proj": ".w2"}
    return hub[word] if "switch_mlp" in name else word


@pytest.mark.parametrize("layout", ["hub", "mlx"])
def test_each_missing_tensor_is_named(layout):
    """Every single tensor of a checkpoint, in either layout, left out in turn."""
    tensors = weights() if layout == "hub" else tiny_weights(tiny_config())
    config = CONFIG if layout == "hub" else tiny_config()
    specs = {n: Spec(tuple(w.shape), w.dtype) for n, w in tensors.items()}
    for name in specs:
        with pytest.raises(CheckpointError, match="lacks") as caught:
            map_checkpoint(config, {n: spec for n, spec in specs.items() if n != name})
        layer = re.match(r"(model\.layers\.\d\.)?", name)[0]
        assert layer in str(caught.value) and last_word(name) in str(caught.value), name


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{HUB_MOE}.experts.{EXPERTS}.w1.weight", (32, 64)),  # one expert more than configured
        (f"{KDA}.q_proj.bias", (64,)),
        (f"{KDA}.k_proj.scales", (3,)),
        (f"{KDA}.kv_b_proj.weight", (128, 32)),  # MLA's, in a KDA layer
        (f"{MLA}.A_log", (2,)),  # KDA's, in an MLA layer
        (f"{MLX_MOE}.switch_mlp.gate_proj.bias", (3,)),
        ("model.layers.4.input_layernorm.weight", (64,)),  # a layer too many
        ("model.layers.0.mlp.gate.weight", (8, 64)),  # a router in a dense layer
        (f"{HUB_MOE}.gate_proj.weight", (128, 64)),  # a dense MLP in an MoE layer
        ("model.layers.0.block_sparse_moe.up_proj.weight", (128, 64)),  # there by another name
        ("visual.patch_embed.weight", (3,)),
    ],
)
def test_each_kind_of_leftover_is_named(name, shape):
    refused(weights() | {name: mx.zeros(shape)}, name.removesuffix(".scales"))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{KDA}.q_proj.weight", (64, 63)),
        (f"{KDA}.dt_bias", (HEADS,)),
        (f"{KDA}.q_conv1d.weight", (64, 4, 1, 1)),
        (f"{KDA}.o_norm.weight", (DIM, 1)),
        (f"{MLA}.kv_b_proj.weight", (96, 32)),
        (f"{MLA}.kv_a_layernorm.weight", (31,)),
        (f"{HUB_MOE}.experts.3.w2.weight", (32, 64)),
        (f"{HUB_MOE}.gate.weight", (EXPERTS + 1, 64)),
        (f"{HUB_MOE}.gate.e_score_correction_bias", (EXPERTS, 1)),
        (f"{HUB_MOE}.shared_experts.up_proj.weight", (64, 32)),
        ("model.embed_tokens.weight", (287, 64)),
        ("model.norm.weight", (1, 64)),
        ("lm_head.weight", (64, 288)),
    ],
)
def test_a_wrong_shape_is_named(name, shape):
    refused(weights() | {name: mx.zeros(shape)}, name, str(list(shape)))


def test_a_wrong_shape_is_named_in_mlx_layout():
    config, tensors = tiny_config(), tiny_weights(tiny_config())
    for name in tensors:
        changed = {**tensors, name: mx.zeros((5, 3))}
        specs = {n: Spec(tuple(w.shape), w.dtype) for n, w in changed.items()}
        with pytest.raises(CheckpointError, match=re.escape(name.rsplit(".", 1)[0])):
            map_checkpoint(config, specs)


@pytest.mark.parametrize("name", [f"{KDA}.q_proj.weight", f"{KDA}.A_log", f"{KDA}.dt_bias"])
def test_a_wrong_dtype_is_named(name):
    tensors = weights()
    refused(tensors | {name: tensors[name].astype(mx.int32)}, name, "int32")


@pytest.mark.parametrize(
    "name",
    [
        f"{KDA}.forget_gate.A_log",
        f"{KDA}.conv1d.weight",
        "model.layers.1.mlp.experts.gate_up_proj",
    ],
)
def test_a_state_dict_saved_by_hand_is_recognised(name):
    """transformers' names in memory differ from those it saves; say so and what to do."""
    refused(weights() | {name: mx.zeros((4, 4))}, "save_pretrained", name)


# --- gate parameters


@pytest.mark.parametrize("padding", [0, 1, 126])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1), (1, 1, -1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_shapes_of_a_log(shape, padding, dtype):
    """A_log flat, as a column, as stored, and zero-padded beyond the heads."""
    values = mx.array([0.5, 1.25])
    padded = mx.concatenate([values, mx.zeros(padding)]).reshape(shape).astype(dtype)
    result = mapped(weights() | {f"{KDA}.A_log": padded})[f"{KDA}.A_log"]
    assert same_bits(result, values.reshape(1, 1, HEADS, 1))


@pytest.mark.parametrize("tail", [1.0, 1e-8, -1e-30, float("nan"), float("inf")])
def test_a_tail_of_a_log_that_is_not_zero_is_refused(tail):
    """Values beyond the heads are padding only if they are zero."""
    padded = mx.concatenate([mx.ones((HEADS,)), mx.array([0.0, tail, 0.0])])
    refused(weights() | {f"{KDA}.A_log": padded}, f"{KDA}.A_log", "not zero")


@pytest.mark.parametrize("shape", [(1,), (1, HEADS // 2), (HEADS, DIM), (1, HEADS, HEADS)])
def test_other_shapes_of_a_log_are_refused(shape):
    """Too few values, or one value per channel."""
    refused(weights() | {f"{KDA}.A_log": mx.zeros(shape)}, f"{KDA}.A_log", "heads")


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_dt_bias_flat_and_by_head(dtype):
    """dt_bias [H*D] and [H,D] are the same numbers."""
    flat = (mx.arange(HEADS * DIM) / 8 - 4).astype(dtype)
    for given in (flat, flat.reshape(HEADS, DIM)):
        result = mapped(weights() | {f"{KDA}.dt_bias": given})[f"{KDA}.dt_bias"]
        assert same_bits(result, flat.astype(mx.float32))


def test_a_tied_head_is_dropped_only_if_it_is_the_embedding():
    tensors = weights()
    refused(tensors, "lm_head.weight", "tie_word_embeddings", tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    result = mapped(tensors, tie_word_embeddings=True)
    assert "lm_head.weight" not in result
    del tensors["lm_head.weight"]
    assert mapped(tensors, tie_word_embeddings=True).keys() == result.keys()
