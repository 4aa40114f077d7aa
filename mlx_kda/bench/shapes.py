"""Released shapes, as config.json has them."""

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "48b": {
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "intermediate_size": 9216,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 72,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
        "mla_use_nope": True,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "model_max_length": 1048576,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "linear_attn_config": {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4},
    }
}


def config(shape: str, layers: int | None = None, **changes: Any) -> dict[str, Any]:
    """config.json of a shape, with other values if given.

    Args:
        shape: a key of `SHAPES`.
        layers: how many; the shape's own unless given. Every fourth is MLA, and the last of 27.
        changes: other entries; those of ``linear_attn_config`` are merged.
    """
    made = SHAPES[shape] | changes
    layers = layers or made["num_hidden_layers"]
    full = [i for i in range(1, layers + 1) if i % 4 == 0 or i == layers == 27]
    made["num_hidden_layers"] = layers
    made["linear_attn_config"] = (
        SHAPES[shape]["linear_attn_config"]
        | changes.get("linear_attn_config", {})
        | {
            "kda_layers": [i for i in range(1, layers + 1) if i not in full],
            "full_attn_layers": full,
        }
    )
    return made
