"""Every tensor of a checkpoint ends where it belongs, or stops the conversion by its name."""

import json
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers.checkpoints import edit_json, read_all, same_bits, stock_logits
from helpers.paths import GOLDENS
from helpers.tiny_checkpoint import CONFIG, weights, write_checkpoint, write_weights
from tolerances import GOLDEN, STOCK

from mlx_kda.convert import convert
from mlx_kda.errors import CheckpointError
from mlx_kda.models import load_model

CASES = sorted(GOLDENS.iterdir())
LINEAR = CONFIG["linear_attn_config"]
HEADS, DIM = LINEAR["num_heads"], LINEAR["head_dim"]
EXPERTS = CONFIG["num_experts"]
KDA = "model.layers.0.self_attn"
MLA = "model.layers.3.self_attn"
HUB_MOE = "model.layers.1.block_sparse_moe"
FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias")


def converted(tmp_path: Path, tensors: dict[str, mx.array], **config) -> dict[str, mx.array]:
    """Write tensors as a checkpoint, convert it, and read the result."""
    source = write_checkpoint(tmp_path / "source", **config)
    write_weights(source, tensors)
    convert(source, tmp_path / "out", overwrite=True)
    return read_all(tmp_path / "out")


def refused(tmp_path: Path, tensors: dict[str, mx.array], *words: str, **config) -> None:
    """Converting fails in one line that holds all the words, and leaves nothing."""
    with pytest.raises(CheckpointError) as caught:
        converted(tmp_path, tensors, **config)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


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
def test_d7_every_tensor_of_every_golden_arrives(golden, tmp_path):
    """Case D7: what save_pretrained wrote, in both dialects, tensor by tensor and bit by bit."""
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


@pytest.mark.parametrize("golden", CASES, ids=lambda path: path.name)
def test_stock_mlx_lm_gives_the_same_logits(golden, tmp_path):
    """Converted files in stock mlx-lm against the source's weights in stock mlx-lm's own loader."""
    tokens = mx.array(np.load(golden / "golden.npz")["tokens"])[None, :40]
    convert(golden, tmp_path / "out", dtype="float32")
    logits = stock_logits(tmp_path / "out", tokens)
    assert mx.isfinite(logits).all().item()
    # stock mlx-lm reads the hub's names itself, but neither the other dialect nor its names
    if golden.name.startswith("hub"):
        truth = stock_logits(golden, tokens, mx.float32)
        assert mx.abs(logits - truth).max().item() <= STOCK * mx.abs(truth).max().item()


@pytest.mark.parametrize("golden", CASES, ids=lambda path: path.name)
def test_converted_goldens_give_the_logits_of_transformers(golden, tmp_path):
    """Converted to float32 and loaded here, against transformers' float64 logits."""
    convert(golden, tmp_path / "out", dtype="float32")
    truth = np.load(golden / "golden.npz")
    count = int(truth["lengths"][0])
    logits = load_model(tmp_path / "out")(mx.array(truth["tokens"][:count])[None])[0]
    wanted = mx.array(truth["logits"][:count])
    error = mx.linalg.norm(logits - wanted) / mx.linalg.norm(wanted)
    assert error.item() <= GOLDEN


def test_experts_are_stacked_in_numeric_order(tmp_path):
    """Expert 10 comes after 9, not after 1; each expert is told apart by its value."""
    tensors = weights()
    shape = tensors[f"{HUB_MOE}.experts.0.w1.weight"].shape
    names = [name for name in tensors if ".experts." in name and "shared" not in name]
    count = 12
    for name in names:
        base = tensors.pop(name)
        stem, tail = re.fullmatch(r"(.*\.experts\.)\d+(\..*)", name).groups()
        for i in range(count):
            tensors[f"{stem}{i}{tail}"] = mx.full(base.shape, float(i))
    for layer in (1, 2, 3):
        moe = f"model.layers.{layer}.block_sparse_moe.gate"
        tensors[f"{moe}.weight"] = mx.zeros((count, CONFIG["hidden_size"]))
        tensors[f"{moe}.e_score_correction_bias"] = mx.zeros((count,))
    result = converted(tmp_path, tensors, num_experts=count)
    stack = result["model.layers.1.mlp.switch_mlp.gate_proj.weight"]
    assert stack.shape == (count, *shape)
    assert stack[:, 0, 0].tolist() == [float(i) for i in range(count)]


def test_both_names_of_dense_layers_are_taken(tmp_path):
    """The hub has mlp.*, save_pretrained block_sparse_moe.*, for the same dense layer."""
    tensors = weights()
    plain = converted(tmp_path, tensors)
    renamed = {
        k.replace("layers.0.mlp.", "layers.0.block_sparse_moe."): v for k, v in tensors.items()
    }
    other = converted(tmp_path, renamed)
    assert plain.keys() == other.keys()
    assert all(same_bits(plain[name], other[name]) for name in plain)


# --- nothing left over, nothing missing (case D7)


@pytest.mark.parametrize("name", sorted(weights()))
def test_d7_a_missing_tensor_stops_the_conversion_by_name(name, tmp_path):
    """Case D7: every single tensor of the source, left out in turn."""
    from mlx_kda.models import map_checkpoint
    from mlx_kda.weights.safetensors import Spec

    specs = {n: Spec(tuple(w.shape), w.dtype) for n, w in weights().items() if n != name}
    with pytest.raises(CheckpointError) as caught:
        map_checkpoint(CONFIG, specs)
    stem = name.removesuffix(".weight").rpartition(".")[2]
    words = {"q_conv1d": "q_conv", "k_conv1d": "k_conv", "v_conv1d": "v_conv"}
    words |= {"kv_b_proj": "kv_b_proj", "w1": ".w1", "w2": ".w2", "w3": ".w3"}
    assert "lacks" in str(caught.value)
    assert words.get(stem, stem) in str(caught.value)


def test_d7_missing_and_leftover_tensors_leave_no_output(tmp_path):
    """Case D7: end to end, one of each."""
    tensors = weights()
    refused(
        tmp_path,
        {k: v for k, v in tensors.items() if k != f"{HUB_MOE}.experts.5.w2.weight"},
        "lacks",
        f"{HUB_MOE}.experts.5.w2.weight",
    )
    refused(
        tmp_path,
        tensors | {f"{KDA}.extra_proj.weight": mx.zeros((2, 2))},
        "does not use",
        f"{KDA}.extra_proj.weight",
    )


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{HUB_MOE}.experts.{EXPERTS}.w1.weight", (32, 64)),  # one expert more than configured
        (f"{KDA}.q_proj.bias", (64,)),
        (f"{KDA}.kv_b_proj.weight", (128, 32)),  # MLA's, in a KDA layer
        (f"{MLA}.A_log", (2,)),  # KDA's, in an MLA layer
        ("model.layers.4.input_layernorm.weight", (64,)),  # a layer too many
        ("model.layers.0.mlp.gate.weight", (8, 64)),  # a router in a dense layer
        (f"{HUB_MOE}.gate_proj.weight", (128, 64)),  # a dense MLP in an MoE layer
    ],
)
def test_d7_each_kind_of_leftover_is_named(name, shape, tmp_path):
    """Case D7: leftovers of every kind are named."""
    refused(tmp_path, weights() | {name: mx.zeros(shape)}, "does not use", name)


def test_d7_two_spellings_of_one_tensor_are_a_leftover(tmp_path):
    tensors = weights()
    double = "model.layers.0.block_sparse_moe.up_proj.weight"
    tensors[double] = tensors["model.layers.0.mlp.up_proj.weight"]
    refused(tmp_path, tensors, "does not use", double)


def test_d7_tensors_left_out_on_purpose_are_reported(tmp_path):
    """Case D7: prediction heads and rotary tables are dropped by name, with the reason."""
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


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{KDA}.q_proj.weight", (64, 63)),
        (f"{KDA}.dt_bias", (HEADS,)),
        (f"{KDA}.q_conv1d.weight", (64, 4, 1, 1)),
        (f"{MLA}.kv_b_proj.weight", (96, 32)),
        (f"{HUB_MOE}.experts.3.w2.weight", (32, 64)),
        (f"{HUB_MOE}.gate.e_score_correction_bias", (EXPERTS, 1)),
        ("model.embed_tokens.weight", (287, 64)),
    ],
)
def test_a_wrong_shape_is_named(name, shape, tmp_path):
    refused(tmp_path, weights() | {name: mx.zeros(shape)}, name, str(list(shape)))


@pytest.mark.parametrize("name", [f"{KDA}.q_proj.weight", f"{KDA}.A_log", f"{KDA}.dt_bias"])
def test_a_wrong_dtype_is_named(name, tmp_path):
    tensors = weights()
    refused(tmp_path, tensors | {name: tensors[name].astype(mx.int32)}, name, "int32")


@pytest.mark.parametrize(
    "name",
    [
        f"{KDA}.forget_gate.A_log",
        f"{KDA}.conv1d.weight",
        "model.layers.1.mlp.experts.gate_up_proj",
    ],
)
def test_a_state_dict_saved_by_hand_is_recognised(name, tmp_path):
    """transformers' names in memory differ from those it saves; say so and what to do."""
    refused(tmp_path, weights() | {name: mx.zeros((4, 4))}, "save_pretrained", name)


# --- gate parameters (case E5)


@pytest.mark.parametrize(
    "shape", [(HEADS,), (HEADS, 1), (1, 1, HEADS, 1), (128,), (128, 1), (1, 1, 128, 1)]
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_e5_shapes_of_a_log(shape, dtype, tmp_path):
    """Case E5: A_log flat, as a column, as stored, and zero-padded beyond the heads."""
    values = mx.array([0.5, 1.25])
    count = int(np.prod(shape))
    padded = mx.concatenate([values, mx.zeros((count - HEADS,))]).reshape(shape).astype(dtype)
    result = converted(tmp_path, weights() | {f"{KDA}.A_log": padded})[f"{KDA}.A_log"]
    assert same_bits(result, values.reshape(1, 1, HEADS, 1))


@pytest.mark.parametrize("tail", [1e-8, float("nan"), float("inf")])
def test_e5_a_tail_of_a_log_that_is_not_zero_is_refused(tail, tmp_path):
    """Case E5: values beyond the heads are padding only if they are zero."""
    padded = mx.concatenate([mx.ones((HEADS,)), mx.array([0.0, tail])])
    refused(tmp_path, weights() | {f"{KDA}.A_log": padded}, f"{KDA}.A_log", "not zero")


@pytest.mark.parametrize("shape", [(1,), (1, HEADS // 2), (HEADS, DIM), (1, HEADS, HEADS)])
def test_e5_other_shapes_of_a_log_are_refused(shape, tmp_path):
    """Case E5: too few values, or a value a channel."""
    refused(tmp_path, weights() | {f"{KDA}.A_log": mx.zeros(shape)}, f"{KDA}.A_log", "heads")


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_e5_dt_bias_flat_and_by_head(dtype, tmp_path):
    """Case E5: dt_bias [H*D] and [H,D] are the same numbers."""
    flat = (mx.arange(HEADS * DIM) / 8 - 4).astype(dtype)
    for given in (flat, flat.reshape(HEADS, DIM)):
        result = converted(tmp_path, weights() | {f"{KDA}.dt_bias": given})[f"{KDA}.dt_bias"]
        assert same_bits(result, flat.astype(mx.float32))


# --- tied embeddings


def test_a_tied_head_is_dropped_only_if_it_is_the_embedding(tmp_path):
    tensors = weights()
    refused(tmp_path, tensors, "lm_head.weight", "tie_word_embeddings", tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    result = converted(tmp_path, tensors, tie_word_embeddings=True)
    assert "lm_head.weight" not in result
    del tensors["lm_head.weight"]
    assert converted(tmp_path, tensors, tie_word_embeddings=True).keys() == result.keys()
    mx.eval(stock_logits(tmp_path / "out", mx.array([[1, 2, 3]])))


# --- the written config


@pytest.mark.parametrize("golden", CASES, ids=lambda path: path.name)
def test_the_written_config_says_the_same_in_the_hubs_dialect(golden, tmp_path):
    from mlx_kda.models.kimi_linear import KimiLinearConfig

    convert(golden, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    source = json.loads((golden / "config.json").read_text())
    assert KimiLinearConfig.from_dict(written) == KimiLinearConfig.from_dict(source)
    assert "auto_map" not in written
    assert "layer_types" not in written
    assert "mlp_layer_types" not in written
    assert written["torch_dtype"] == ("float32" if golden.name == "hub-wide-head" else "bfloat16")


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
    dense = [k for k in tensors if k.startswith("model.layers.2.block_sparse_moe")]
    for name in dense:
        del tensors[name]
    for part in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"model.layers.2.mlp.{part}.weight"] = tensors[f"model.layers.0.mlp.{part}.weight"]
    write_weights(source, tensors)
    edit_json(source / "config.json", mlp_layer_types=["dense", "sparse", "dense", "sparse"])
    report = convert(source, tmp_path / "out")
    # every second layer from 1 on is no multiple of 2
    assert any("stock mlx-lm" in warning for warning in report.warnings)
    assert convert(tmp_path / "out", tmp_path / "again").parameters == report.parameters
