"""config.json of Kimi Linear, in either dialect, as one checked dataclass.

The hub's dialect numbers layers from 1 in ``linear_attn_config``; the dialect that transformers
writes lists a type a layer. What a config asks for and this package does not compute is refused by
its name, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from .hybrid_config import DENSE, KDA, MLA, MOE, HybridConfig, check_bound, check_integer

_NATIVE_ATTENTION = {"linear_attention": KDA, "full_attention": MLA}
_NATIVE_MLP = {"dense": DENSE, "sparse": MOE}
_LINEAR_KEYS = {
    "kda_layers",
    "full_attn_layers",
    "num_heads",
    "head_dim",
    "short_conv_kernel_size",
    "gate_lower_bound",
}
# Spellings of one number: the hub's, then transformers'.
_ALIASES = {
    "num_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_token": ("num_experts_per_token", "num_experts_per_tok"),
    "num_shared_experts": ("num_shared_experts", "n_shared_experts"),
    "num_expert_group": ("num_expert_group", "n_group"),
    "moe_renormalize": ("moe_renormalize", "norm_topk_prob"),
    "model_max_length": ("model_max_length", "max_position_embeddings"),
}


@dataclass(frozen=True)
class KimiLinearConfig(HybridConfig):
    """Shapes and rules of one Kimi Linear model."""

    model_type: str = "kimi_linear"

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "KimiLinearConfig":
        """Read config.json's dictionary, either dialect.

        Raises:
            CheckpointError: a key missing, a value out of range, or a feature that is not built.
        """
        if config.get("model_type") != "kimi_linear":
            raise CheckpointError(
                f"config.json: model_type is {config.get('model_type')!r}, expected 'kimi_linear'"
            )
        _refuse_unbuilt(config)
        linear = config.get("linear_attn_config") or {}
        layers = _integer(config, "num_hidden_layers")
        nope = _integer(config, "qk_nope_head_dim", config.get("head_dim"))
        heads = _integer(linear, "num_heads", config.get("linear_num_heads"))
        dim = _integer(linear, "head_dim", config.get("linear_head_dim"))
        result = cls(
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=_integer(config, "hidden_size"),
            layer_types=_layer_types(config, linear, layers),
            mlp_layer_types=_mlp_layer_types(config, layers),
            intermediate_size=_integer(config, "intermediate_size"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
            model_max_length=_integer(config, "model_max_length", 1048576),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            linear_num_heads=heads,
            linear_head_dim=dim,
            linear_num_v_heads=heads,
            linear_v_head_dim=dim,
            linear_conv_kernel_dim=_integer(
                linear, "short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4)
            ),
            num_attention_heads=_integer(config, "num_attention_heads"),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=_integer(config, "qk_rope_head_dim", 0, least=0),
            v_head_dim=_integer(config, "v_head_dim", config.get("head_dim", nope)),
            kv_lora_rank=_integer(config, "kv_lora_rank"),
            num_experts=_integer(config, "num_experts", 0, least=0),
            num_experts_per_token=_integer(config, "num_experts_per_token", 1),
            moe_intermediate_size=_integer(config, "moe_intermediate_size", 0, least=0),
            num_shared_experts=_integer(config, "num_shared_experts", 0, least=0),
            num_expert_group=_integer(config, "num_expert_group", 1),
            topk_group=_integer(config, "topk_group", 1),
            moe_router_activation_func=config.get("moe_router_activation_func") or "sigmoid",
            moe_renormalize=bool(_get(config, "moe_renormalize", True)),
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


def _refuse_unbuilt(config: Mapping[str, Any]) -> None:
    """Name the first feature asked for that this package does not compute."""
    linear = config.get("linear_attn_config") or {}
    scaling = config.get("rope_scaling")
    wrong = [
        ("mla_use_nope", config.get("mla_use_nope", True) is not True, "rotary MLA"),
        ("rope_scaling", bool(scaling), "rotary position scaling"),
        ("q_lora_rank", config.get("q_lora_rank") is not None, "low-rank MLA queries"),
        ("hidden_act", config.get("hidden_act", "silu") not in ("silu", "swish"), "activation"),
        ("attention_bias", bool(config.get("attention_bias")), "biases in attention"),
        (
            "moe_router_activation_func",
            config.get("moe_router_activation_func") not in (None, "sigmoid", "softmax"),
            "router activation",
        ),
        (
            "topk_method",
            config.get("topk_method") not in (None, "noaux_tc"),
            "choice of experts",
        ),
        (
            "num_nextn_predict_layers",
            bool(config.get("num_nextn_predict_layers")),
            "multi-token prediction layers",
        ),
        ("sliding_window", config.get("sliding_window") is not None, "sliding-window attention"),
    ]
    wrong += [
        (f"linear_attn_config.{key}", bool(value), "linear attention option")
        for key, value in linear.items()
        if key not in _LINEAR_KEYS
    ]
    wrong += [
        (key, bool(value), "model feature")
        for key, value in config.items()
        if key.startswith(_FOREIGN)
    ]
    for key, asked, what in wrong:
        if asked:
            value = linear.get(key.split(".")[-1]) if "." in key else config.get(key)
            raise CheckpointError(f"config.json: {key}={value!r} ({what}) is not supported")


# Keys of sibling families; a config that carries one is not plain Kimi Linear.
_FOREIGN = (
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


def _layer_types(config: Mapping, linear: Mapping, layers: int) -> tuple[str, ...]:
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
    return _typed(config, "layer_types", _NATIVE_ATTENTION, layers)


def _mlp_layer_types(config: Mapping, layers: int) -> tuple[str, ...]:
    """Dense or MoE for each layer."""
    if config.get("mlp_layer_types") is not None:
        return _typed(config, "mlp_layer_types", _NATIVE_MLP, layers)
    if not _get(config, "num_experts", 0):
        return (DENSE,) * layers
    first = _integer(config, "first_k_dense_replace", 0, least=0)
    every = _integer(config, "moe_layer_freq", 1)
    return tuple(MOE if i >= first and i % every == 0 else DENSE for i in range(layers))


def _typed(config: Mapping, key: str, names: Mapping, layers: int) -> tuple[str, ...]:
    types = config[key]
    if len(types) != layers:
        raise CheckpointError(
            f"config.json: {key} has {len(types)} entries for {layers} hidden layers"
        )
    unknown = next((t for t in types if t not in names), None)
    if unknown is not None:
        raise CheckpointError(f"config.json: {key} holds {unknown!r}, which is not supported")
    return tuple(names[t] for t in types)


def _get(config: Mapping, key: str, default: Any = None) -> Any:
    """The first spelling of ``key`` that is present and not null."""
    for name in _ALIASES.get(key, (key,)):
        if config.get(name) is not None:
            return config[name]
    return default


def _integer(config: Mapping, key: str, default: Any = None, least: int = 1) -> int:
    value = _get(config, key, default)
    return check_integer(key, value, least)


__all__ = ["DENSE", "KDA", "MLA", "MOE", "KimiLinearConfig"]
