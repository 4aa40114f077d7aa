"""Both dialects of config.json, and the refusal of what is not built."""

import json

import pytest
from helpers.paths import GOLDENS
from helpers.tiny import tiny_config

from mlx_kda.errors import CheckpointError
from mlx_kda.models import get_model_classes
from mlx_kda.models.hybrid_config import DENSE, KDA, MLA, MOE
from mlx_kda.models.kimi_linear import KimiLinearConfig


def native_config() -> dict:
    """``tiny_config`` as transformers would write it."""
    config = tiny_config()
    linear = config.pop("linear_attn_config")
    for key in (
        "first_k_dense_replace",
        "moe_layer_freq",
        "mla_use_nope",
        "rope_theta",
        "rope_scaling",
        "moe_router_activation_func",
    ):
        del config[key]
    return {
        **config,
        "head_dim": config["qk_rope_head_dim"],
        "dtype": "bfloat16",
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "linear_num_heads": linear["num_heads"],
        "linear_head_dim": linear["head_dim"],
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
    }


def test_both_dialects_give_the_same_config():
    hub = KimiLinearConfig.from_dict(tiny_config())
    assert hub == KimiLinearConfig.from_dict(native_config())
    assert hub.layer_types == (KDA, KDA, KDA, MLA)
    assert hub.mlp_layer_types == (DENSE, MOE, MOE, MOE)


def test_hub_layers_count_from_one():
    config = KimiLinearConfig.from_dict(tiny_config(kda_layers=[2, 3, 4], full_attn_layers=[1]))
    assert config.layer_types == (MLA, KDA, KDA, KDA)


def test_the_published_48b_config():
    """The numbers of the released model, and 1-based lists that end with an MLA layer."""
    full = [4, 8, 12, 16, 20, 24, 27]
    config = KimiLinearConfig.from_dict(
        tiny_config(
            num_hidden_layers=27,
            kda_layers=[i for i in range(1, 28) if i not in full],
            full_attn_layers=full,
            num_experts=256,
            num_experts_per_token=8,
        )
    )
    assert config.layer_types.count(KDA) == 20
    assert [i for i, kind in enumerate(config.layer_types) if kind == MLA] == [i - 1 for i in full]
    assert config.mlp_layer_types == (DENSE,) + (MOE,) * 26


@pytest.mark.parametrize("every, first", [(1, 0), (1, 2), (2, 1), (3, 0)])
def test_dense_and_moe_layers_of_the_hub(every, first):
    config = KimiLinearConfig.from_dict(
        tiny_config(moe_layer_freq=every, first_k_dense_replace=first)
    )
    want = tuple(MOE if i >= first and i % every == 0 else DENSE for i in range(4))
    assert config.mlp_layer_types == want


def test_no_experts_means_dense_layers():
    config = KimiLinearConfig.from_dict(tiny_config(num_experts=0))
    assert config.mlp_layer_types == (DENSE,) * 4


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ("num_experts", "num_local_experts"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("num_shared_experts", "n_shared_experts"),
        ("num_expert_group", "n_group"),
        ("moe_renormalize", "norm_topk_prob"),
        ("model_max_length", "max_position_embeddings"),
    ],
)
def test_other_spellings(ours, theirs):
    changed = tiny_config(num_expert_group=2, num_shared_experts=2, moe_renormalize=False)
    want = KimiLinearConfig.from_dict(changed)
    changed[theirs] = changed.pop(ours)
    assert KimiLinearConfig.from_dict(changed) == want


def test_the_context_limit_is_read_from_model_max_length():
    """The hub's config has no max_position_embeddings, and still 1,048,576."""
    hub = tiny_config()
    assert "max_position_embeddings" not in hub
    assert KimiLinearConfig.from_dict(hub).model_max_length == 1_048_576
    assert KimiLinearConfig.from_dict(native_config()).model_max_length == 1_048_576
    del hub["model_max_length"]
    assert KimiLinearConfig.from_dict(hub).model_max_length == 1_048_576
    hub["model_max_length"] = 4096
    assert KimiLinearConfig.from_dict(hub).model_max_length == 4096
    for path in GOLDENS.glob("*/config.json"):
        config = KimiLinearConfig.from_dict(json.loads(path.read_text()))
        assert config.model_max_length == 1_048_576


@pytest.mark.parametrize(
    "key, value",
    [
        ("mla_use_nope", False),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("q_lora_rank", 1536),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("moe_router_activation_func", "sqrtsoftplus"),
        ("topk_method", "group_limited_greedy"),
        ("num_nextn_predict_layers", 1),
        ("sliding_window", 4096),
        ("kda_safe_gate", True),
        ("kda_lower_bound", -5.0),
        ("allow_neg_eigval", True),
        ("attn_res_block_size", 12),
    ],
)
def test_what_is_not_built_is_refused_by_name(key, value):
    """``mla_use_nope: false`` and every other feature that is not computed."""
    with pytest.raises(CheckpointError, match=key) as error:
        KimiLinearConfig.from_dict(tiny_config(**{key: value}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["use_full_rank_gate", "allow_neg_eigval", "safe_gate"])
def test_unknown_linear_attention_options_are_refused(key):
    config = tiny_config()
    config["linear_attn_config"][key] = True
    with pytest.raises(CheckpointError, match=key):
        KimiLinearConfig.from_dict(config)
    config["linear_attn_config"][key] = False  # asked not to: nothing to refuse
    KimiLinearConfig.from_dict(config)


def test_a_bound_switches_the_gate():
    """And a bound that is not negative is refused."""
    config = tiny_config()
    assert KimiLinearConfig.from_dict(config).gate_lower_bound is None
    config["linear_attn_config"]["gate_lower_bound"] = -5.0
    assert KimiLinearConfig.from_dict(config).gate_lower_bound == -5.0
    model = get_model_classes(config)[0](KimiLinearConfig.from_dict(config))
    assert model.layers[0].self_attn.lower_bound == -5.0
    config["linear_attn_config"]["gate_lower_bound"] = 5.0
    with pytest.raises(CheckpointError, match="gate_lower_bound"):
        KimiLinearConfig.from_dict(config)


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "num_hidden_layers", "kv_lora_rank", "intermediate_size"]
)
@pytest.mark.parametrize("value", [None, 0, -1, "64", 64.5, True])
def test_sizes_must_be_positive_integers(key, value):
    config = tiny_config(**{key: value})
    with pytest.raises(CheckpointError, match=key):
        KimiLinearConfig.from_dict(config)


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"kda_layers": [0, 1, 2], "full_attn_layers": [3]}, "count from 1"),
        ({"kda_layers": [1, 2, 3], "full_attn_layers": [3, 4]}, "once"),
        ({"kda_layers": [1, 2], "full_attn_layers": [4]}, "each of the layers"),
        ({"num_expert_group": 3}, "8 experts in 3 groups"),
        ({"num_expert_group": 4, "topk_group": 5}, "5 kept"),
        ({"num_expert_group": 4, "topk_group": 1, "num_experts_per_token": 3}, "2 experts"),
        ({"num_experts_per_token": 9}, "num_experts_per_token"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"model_type": "kimi_k3"}, "kimi_k3"),
    ],
)
def test_contradictory_configs_are_refused(changes, names):
    with pytest.raises(CheckpointError, match=names):
        KimiLinearConfig.from_dict(tiny_config(**changes))


@pytest.mark.parametrize(
    "config, names",
    [
        (native_config() | {"layer_types": ["linear_attention"] * 3}, "3 entries for 4"),
        (
            native_config() | {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]},
            "sliding_attention",
        ),
        (native_config() | {"mlp_layer_types": ["dense", "sparse", "sparse", "hash"]}, "hash"),
        (native_config() | {"layer_types": None}, "neither"),
    ],
)
def test_contradictory_native_configs_are_refused(config, names):
    with pytest.raises(CheckpointError, match=names):
        KimiLinearConfig.from_dict(config)


def test_an_unknown_model_type_is_refused_with_what_is_supported():
    with pytest.raises(CheckpointError, match=r"'llama'.*kimi_linear"):
        get_model_classes({"model_type": "llama"})
    with pytest.raises(CheckpointError, match="no model_type; supported: kimi_linear"):
        get_model_classes({})
