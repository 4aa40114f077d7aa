"""FLA's pure KDA models: their config, names, self-check and quantisation."""

import json

import mlx.core as mx
import numpy as np
import pytest
from helpers.paths import FLA_GOLDENS
from helpers.tiny import difference
from mlx.utils import tree_flatten

from mlx_kda import doctor
from mlx_kda.convert import convert, verify
from mlx_kda.errors import CheckpointError
from mlx_kda.models import get_model_classes, load_model, map_checkpoint
from mlx_kda.models.fla_kda import FlaKdaConfig
from mlx_kda.weights.source import open_source

FOLDER = FLA_GOLDENS
NAMES = sorted(path.name for path in FOLDER.iterdir())
WITH_KERNELS = [name for name in NAMES if name != "odd-heads"]


def _config(name: str = "plain", **changes) -> dict:
    return json.loads((FOLDER / name / "config.json").read_text()) | changes


@pytest.mark.parametrize("name", ["wide-values", "negative-tied"])
def test_the_self_check_knows_these_shapes(name):
    """What `doctor` does on a Mac: each kernel against the operations on a layer of this family."""
    layer = load_model(FOLDER / name).kda_layers[0]
    verdicts = list(doctor.check(layer, mx.float32, "emulator-fast"))
    assert {v.kernel for v in verdicts} == {"kda_decode", "kda_recurrent", "kda_chunk"}
    assert all(v.ok for v in verdicts), [doctor.describe(v) for v in verdicts]


@pytest.mark.parametrize("name", ["wide-values", "negative-tied"])
def test_verify_compares_a_quantised_folder_with_its_source(name, tmp_path):
    rules = ["self_attn.g_b_proj=8,32"]  # a map with a bias of its own
    report = convert(FOLDER / name, tmp_path / "q8", q_bits=8, q_group_size=32, q_rules=rules)
    found = verify(tmp_path / "q8", FOLDER / name)
    assert found.ok, [check for check in found.checks if not check.ok]
    config, mapping = map_checkpoint(_config(name), open_source(FOLDER / name).tensors)
    assert report.parameters == mapping.parameters
    assert "KDA gates" in found.comparison.families
    model = load_model(tmp_path / "q8")
    quantised = model.layers[0].self_attn
    assert quantised.g_b_proj.bits == 8 and "bias" in quantised.g_b_proj
    data = np.load(FOLDER / name / "golden.npz")
    count = data["lengths"][0]
    logits = model(mx.array(data["tokens"][:count])[None])[0]
    assert difference(logits.astype(mx.float32), data["logits"][:count]) < 0.2
    assert config.linear_state_shape[0] == quantised.num_v_heads


def test_the_default_recipe_spares_the_gate_path(tmp_path):
    report = convert(FOLDER / "plain", tmp_path / "q4", q_bits=4, q_group_size=32)
    kept = {path.rpartition(".")[2] for path, why in report.kept.items() if why == "gate path"}
    assert kept == {"b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"}
    source = open_source(FOLDER / "plain")
    out = load_model(tmp_path / "q4")
    for ours, theirs in (("A_log", "A_log"), ("dt_bias", "dt_bias")):
        got = out.layers[1].self_attn[ours]
        want = source.read(f"model.layers.1.attn.{theirs}").astype(mx.float32)
        assert got.dtype == mx.float32 and mx.array_equal(got.flatten(), want).item()


def test_the_state_dict_of_fla_is_sanitised():
    """mlx-lm's contract: `sanitize` takes FLA's names, and what it made already."""
    config = _config("more-value-heads")
    model_class, args_class = get_model_classes(config)
    model = model_class(args_class.from_dict(config))
    source = open_source(FOLDER / "more-value-heads")
    once = model.sanitize({name: source.read(name) for name in source.tensors})
    assert once.keys() == dict(tree_flatten(model.parameters())).keys()
    assert model.sanitize(once).keys() == once.keys()


LAYER = "model.layers.0"


@pytest.mark.parametrize("name", sorted(open_source(FOLDER / "plain").tensors))
def test_a_missing_tensor_is_named(name):
    tensors = dict(open_source(FOLDER / "plain").tensors)
    del tensors[name]
    with pytest.raises(CheckpointError, match="lacks") as caught:
        map_checkpoint(_config(), tensors)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.attn.f_proj.0.bias",
        f"{LAYER}.attn.q_conv1d.bias",
        f"{LAYER}.attn.k_norm.weight",
        "model.layers.9.attn_norm.weight",
        "model.res_norm.weight",
    ],
)
def test_a_tensor_left_over_is_named(name):
    tensors = dict(open_source(FOLDER / "plain").tensors)
    tensors[name] = tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match="does not use") as caught:
        map_checkpoint(_config(), tensors)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"expand_v": 2.0}, {"num_v_heads": 4}, {"head_dim": 16}, {"conv_size": 3}, {"num_heads": 4}],
)
def test_shapes_that_the_config_does_not_ask_for_are_refused(changes):
    with pytest.raises(CheckpointError, match="has shape"):
        map_checkpoint(_config(**changes), open_source(FOLDER / "plain").tensors)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn": {"layers": [1], "num_heads": 2}}, ("attn=", "softmax")),
        ({"use_short_conv": False}, ("use_short_conv", "convolution")),
        ({"conv_bias": True}, ("conv_bias",)),
        ({"hidden_act": "powlu"}, ("hidden_act", "powlu")),
        ({"attnres_block_size": 4}, ("attnres_block_size", "residuals")),
        ({"safe_gate": True, "lower_bound": None}, ("safe_gate", "lower_bound")),
        ({"lower_bound": 0.5}, ("lower_bound", "negative")),
        ({"num_v_heads": 3}, ("num_v_heads", "multiple of num_heads = 2")),
        ({"num_v_heads": 1}, ("num_v_heads", "multiple")),
        ({"expand_v": 1.01}, ("expand_v", "whole number")),
        ({"expand_v": 0}, ("expand_v",)),
        ({"hidden_ratio": -1, "intermediate_size": None}, ("hidden_ratio",)),
        ({"num_heads": "two"}, ("num_heads", "integer")),
        ({"model_type": "kimi_linear"}, ("kimi_linear",)),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes, words):
    with pytest.raises(CheckpointError) as caught:
        FlaKdaConfig.from_dict(_config(**changes))
    assert all(word in str(caught.value) for word in words)


def test_what_only_says_how_fla_computes_changes_nothing():
    plain = FlaKdaConfig.from_dict(_config())
    for changes in (
        {"attn_mode": "fused_recurrent"},
        {"fuse_norm": True, "fuse_swiglu": True, "fuse_cross_entropy": False},
        {"use_l2warp": True, "initializer_range": 0.006, "use_cache": False},
        {"attn": None, "num_v_heads": 2, "expand_v": 1, "hidden_act": "silu"},
    ):
        assert FlaKdaConfig.from_dict(_config(**changes)) == plain
    bounded = FlaKdaConfig.from_dict(_config(lower_bound=-5))
    assert bounded == FlaKdaConfig.from_dict(_config(lower_bound=-5.0, safe_gate=True))
    assert bounded != plain


def test_missing_keys_have_flas_defaults():
    config = FlaKdaConfig.from_dict({"model_type": "kda"})
    assert config.num_hidden_layers == 24 and config.hidden_size == 2048
    assert (config.linear_num_heads, *config.linear_state_shape) == (16, 16, 128, 128)
    assert config.intermediate_size == 5632  # 2048 * 4 * 2 / 3, up to a multiple of 256
    assert config.rms_norm_eps == 1e-6 and config.vocab_size == 32000
