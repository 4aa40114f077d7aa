"""Kimi Linear: KDA layers with an MLA layer now and then, dense or mixture-of-experts MLPs.

Its config.json comes in two dialects: the hub's numbers layers from 1 in ``linear_attn_config``,
transformers' has one type per layer. A feature that is not computed here is refused by name, never
ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from .hybrid_config import (
    DENSE,
    KDA,
    MLA,
    MOE,
    HybridConfig,
    check_bound,
    check_model_type,
    get,
    integer,
    refuse,
)

_ATTENTION = {"linear_attention": KDA, "full_attention": MLA}
_MLP = {"dense": DENSE, "sparse": MOE}
_LINEAR_KEYS = {
    "kda_layers",
    "full_attn_layers",
    "num_heads",
    "head_dim",
    "short_conv_kernel_size",
    "gate_lower_bound",
}
# transformers' key -> the hub's
_HUB_KEYS = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "max_position_embeddings": "model_max_length",
}
# Keys that only transformers' dialect has.
_NATIVE_KEYS = {
    *_HUB_KEYS,
    "layer_types",
    "mlp_layer_types",
    "linear_head_dim",
    "linear_num_heads",
    "linear_conv_kernel_dim",
}
# Keys of sibling families; a config that carries one is not plain Kimi Linear.
_OTHER_FAMILIES = (
    "kda_lower_bound",
    "kda_safe_gate",
    "gate_lower_bound",
    "safe_gate",
    "allow_neg_eigval",
    "expand_v",
    "attn_res_block_size",
    "moe_latent",
    "activation_situ",
    "mla_use_output_gate",
)


@dataclass(frozen=True)
class KimiLinearConfig(HybridConfig):
    """Shapes and rules of one Kimi Linear model."""

    model_type: str = "kimi_linear"

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "KimiLinearConfig":
        check_model_type(config, cls.model_type)
        config = _with_hub_keys(config)
        _refuse_unsupported(config)
        linear = config.get("linear_attn_config") or {}
        layers = integer(config, "num_hidden_layers")
        nope = integer(config, "qk_nope_head_dim", config.get("head_dim"))
        heads = integer(linear, "num_heads", config.get("linear_num_heads"))
        dim = integer(linear, "head_dim", config.get("linear_head_dim"))
        result = cls(
            vocab_size=integer(config, "vocab_size"),
            hidden_size=integer(config, "hidden_size"),
            layer_types=_layer_types(config, linear, layers),
            mlp_layer_types=_mlp_layer_types(config, layers),
            intermediate_size=integer(config, "intermediate_size"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
            model_max_length=integer(config, "model_max_length", 1048576),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            linear_num_heads=heads,
            linear_head_dim=dim,
            linear_num_v_heads=heads,
            linear_v_head_dim=dim,
            linear_conv_kernel_dim=integer(
                linear, "short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4)
            ),
            num_attention_heads=integer(config, "num_attention_heads"),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=integer(config, "qk_rope_head_dim", 0, least=0),
            v_head_dim=integer(config, "v_head_dim", config.get("head_dim", nope)),
            kv_lora_rank=integer(config, "kv_lora_rank"),
            num_experts=integer(config, "num_experts", 0, least=0),
            num_experts_per_token=integer(config, "num_experts_per_token", 1),
            moe_intermediate_size=integer(config, "moe_intermediate_size", 0, least=0),
            num_shared_experts=integer(config, "num_shared_experts", 0, least=0),
            num_expert_group=integer(config, "num_expert_group", 1),
            topk_group=integer(config, "topk_group", 1),
            moe_router_activation_func=config.get("moe_router_activation_func") or "sigmoid",
            moe_renormalize=bool(get(config, "moe_renormalize", True)),
            routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
            gate_lower_bound=linear.get("gate_lower_bound"),
        )
        result._check()
        return result

    def _check(self) -> None:
        check_bound("gate_lower_bound", self.gate_lower_bound)
        if MOE not in self.mlp_layer_types:
            return
        E, groups, kept = self.num_experts, self.num_expert_group, self.topk_group
        if not (E and self.moe_intermediate_size):
            raise CheckpointError(
                "config.json: MoE layers need num_experts and moe_intermediate_size above 0"
            )
        if E % groups or not 1 <= kept <= groups:
            raise CheckpointError(
                f"config.json: {E} experts in {groups} groups, {kept} kept, do not divide"
            )
        if not 1 <= self.num_experts_per_token <= E // groups * kept:
            raise CheckpointError(
                f"config.json: num_experts_per_token is {self.num_experts_per_token} of "
                f"{E // groups * kept} experts to choose from"
            )


def _with_hub_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the hub's keys where it has only transformers'."""
    renamed = {hub: config[key] for key, hub in _HUB_KEYS.items() if key in config}
    return {**config, **{k: v for k, v in renamed.items() if config.get(k) is None}}


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for the first feature that this package does not compute."""
    linear = config.get("linear_attn_config") or {}
    absent = object()

    def other_than(key: str, *allowed: Any) -> bool:
        return config.get(key, absent) not in (absent, *allowed)

    asked = [
        ("mla_use_nope", config.get("mla_use_nope", True) is not True, "rotary MLA"),
        ("rope_scaling", bool(config.get("rope_scaling")), "rotary position scaling"),
        ("q_lora_rank", other_than("q_lora_rank", None), "low-rank MLA queries"),
        ("hidden_act", other_than("hidden_act", "silu", "swish"), "activation"),
        ("attention_bias", bool(config.get("attention_bias")), "biases in attention"),
        (
            "moe_router_activation_func",
            other_than("moe_router_activation_func", None, "sigmoid", "softmax"),
            "router activation",
        ),
        ("topk_method", other_than("topk_method", None, "noaux_tc"), "choice of experts"),
        (
            "num_nextn_predict_layers",
            bool(config.get("num_nextn_predict_layers")),
            "multi-token prediction layers",
        ),
        ("sliding_window", other_than("sliding_window", None), "sliding-window attention"),
    ]
    refuse((key, config.get(key), wrong, what) for key, wrong, what in asked)
    refuse(
        (f"linear_attn_config.{key}", value, bool(value), "linear attention option")
        for key, value in linear.items()
        if key not in _LINEAR_KEYS
    )
    refuse(
        (key, value, bool(value), "model feature")
        for key, value in config.items()
        if key.startswith(_OTHER_FAMILIES)
    )


def _layer_types(
    config: Mapping[str, Any], linear: Mapping[str, Any], layers: int
) -> tuple[str, ...]:
    """KDA or MLA for each layer; the hub's 1-based lists win, as they do in transformers."""
    if "kda_layers" in linear:
        kda = list(linear["kda_layers"])
        full = list(linear.get("full_attn_layers", set(range(1, layers + 1)) - set(kda)))
        if sorted(kda + full) != list(range(1, layers + 1)):
            raise CheckpointError(
                "config.json: kda_layers and full_attn_layers must name each of the layers "
                f"1 to {layers} once (they count from 1)"
            )
        return tuple(KDA if i + 1 in kda else MLA for i in range(layers))
    if config.get("layer_types") is None:
        raise CheckpointError(
            "config.json: neither linear_attn_config.kda_layers nor layer_types says which "
            "layers are KDA"
        )
    return _per_layer(config, "layer_types", _ATTENTION, layers)


def _mlp_layer_types(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Dense or MoE for each layer."""
    if config.get("mlp_layer_types") is not None:
        return _per_layer(config, "mlp_layer_types", _MLP, layers)
    if not config.get("num_experts"):
        return (DENSE,) * layers
    first = integer(config, "first_k_dense_replace", 0, least=0)
    every = integer(config, "moe_layer_freq", 1)
    return _by_rule(first, every, layers)


def _by_rule(first: int, every: int, layers: int) -> tuple[str, ...]:
    """MoE in every so many layers from the first MoE layer on, as the hub's dialect says it."""
    return tuple(MOE if i >= first and i % every == 0 else DENSE for i in range(layers))


def _per_layer(
    config: Mapping[str, Any], key: str, names: Mapping[str, str], layers: int
) -> tuple[str, ...]:
    """A list of transformers' dialect, one type per layer, in the words used here."""
    types = config[key]
    if len(types) != layers:
        raise CheckpointError(
            f"config.json: {key} has {len(types)} entries for {layers} hidden layers"
        )
    unknown = next((t for t in types if t not in names), None)
    if unknown is not None:
        raise CheckpointError(f"config.json: {key} holds {unknown!r}, which is not supported")
    return tuple(names[t] for t in types)


ModelArgs = KimiLinearConfig


def own_config(raw: dict[str, Any], config: KimiLinearConfig) -> tuple[dict[str, Any], list[str]]:
    """config.json in the hub's dialect, which mlx-lm reads, and warnings of what it does not read.

    Unknown keys of ``raw`` are kept.
    """
    warnings = []
    first, freq = _dense_rule(config)
    types = list(enumerate(config.layer_types, start=1))
    linear = dict(raw.get("linear_attn_config") or {}) | {
        "kda_layers": [n for n, kind in types if kind == KDA],
        "full_attn_layers": [n for n, kind in types if kind != KDA],
        "num_heads": config.linear_num_heads,
        "head_dim": config.linear_head_dim,
        "short_conv_kernel_size": config.linear_conv_kernel_dim,
    }
    heads = config.num_attention_heads
    result = {key: value for key, value in raw.items() if key not in _NATIVE_KEYS}
    result |= {
        "model_type": config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or config.qk_nope_head_dim,
        "rope_theta": raw.get("rope_theta") or 10000.0,  # required by mlx-lm; nothing rotates
        "rms_norm_eps": config.rms_norm_eps,
        "linear_attn_config": linear,
        "mla_use_nope": True,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "kv_lora_rank": config.kv_lora_rank,
        "model_max_length": config.model_max_length,
        "tie_word_embeddings": config.tie_word_embeddings,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.num_experts_per_token,
        "num_shared_experts": config.num_shared_experts,
        "moe_intermediate_size": config.moe_intermediate_size,
        "moe_router_activation_func": config.moe_router_activation_func,
        "moe_renormalize": config.moe_renormalize,
        "routed_scaling_factor": config.routed_scaling_factor,
        "num_expert_group": config.num_expert_group,
        "topk_group": config.topk_group,
        "use_grouped_topk": raw.get("use_grouped_topk", True),
        "first_k_dense_replace": first,
        "moe_layer_freq": freq,
    }
    if _by_rule(first, freq, len(config.layer_types)) != config.mlp_layer_types:
        result["mlp_layer_types"] = [
            "sparse" if kind == MOE else "dense" for kind in config.mlp_layer_types
        ]
        warnings.append(
            "stock mlx-lm cannot express which layers are MoE and will refuse this model"
        )
    if config.gate_lower_bound is not None:
        linear["gate_lower_bound"] = config.gate_lower_bound
        warnings.append("stock mlx-lm ignores gate_lower_bound and will compute another gate")
    return result, warnings


def _dense_rule(config: KimiLinearConfig) -> tuple[int, int]:
    """``first_k_dense_replace`` and ``moe_layer_freq`` for these MoE layers, if any can say it."""
    kinds = config.mlp_layer_types
    if MOE not in kinds:
        return len(kinds), 1
    first = kinds.index(MOE)
    for freq in range(1, len(kinds) + 1):
        if _by_rule(first, freq, len(kinds)) == kinds:
            return first, freq
    return first, 1
