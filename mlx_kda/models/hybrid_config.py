"""The config that every family's config.json is read into: shapes and rules of a hybrid model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..errors import CheckpointError

KDA = "kda"
MLA = "mla"
DENSE = "dense"
MOE = "moe"


@dataclass(frozen=True)
class HybridConfig:
    """Shapes and rules of one model of KDA and MLA layers; layers are counted from 0.

    ``gate_lower_bound`` None means the softplus gate, a negative number the bounded one.
    ``output_gate_bias`` is a bias on the map to the output gate, ``allow_neg_eigval`` doubles beta.
    ``latent_norm_eps`` is not in any config: the published model code leaves the norm of the MLA
    latents at its default of 1e-6, whatever ``rms_norm_eps`` says. What a model without MLA or MoE
    layers does not have stays 0.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    intermediate_size: int
    rms_norm_eps: float
    model_max_length: int
    tie_word_embeddings: bool
    linear_num_heads: int
    linear_head_dim: int
    linear_num_v_heads: int
    linear_v_head_dim: int
    linear_conv_kernel_dim: int
    num_attention_heads: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    kv_lora_rank: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 1
    moe_intermediate_size: int = 0
    num_shared_experts: int = 0
    num_expert_group: int = 1
    topk_group: int = 1
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    gate_lower_bound: float | None = None
    output_gate_bias: bool = False
    allow_neg_eigval: bool = False
    latent_norm_eps: float = 1e-6
    model_type: str = ""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json's dictionary.

        Raises:
            CheckpointError: a missing key, a value out of range, or an unsupported feature.
        """
        raise NotImplementedError

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def linear_key_width(self) -> int:
        """Channels of q and of k in a KDA layer."""
        return self.linear_num_heads * self.linear_head_dim

    @property
    def linear_value_width(self) -> int:
        """Channels of v in a KDA layer."""
        return self.linear_num_v_heads * self.linear_v_head_dim

    @property
    def linear_state_shape(self) -> tuple[int, int, int]:
        """Of a KDA layer's state for one sequence: (Hv, Dv, Dk)."""
        return self.linear_num_v_heads, self.linear_v_head_dim, self.linear_head_dim


def get(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A value of config.json; the default where it is missing or null."""
    value = config.get(key)
    return default if value is None else value


def integer(config: Mapping[str, Any], key: str, default: Any = None, least: int = 1) -> int:
    """A number of config.json; CheckpointError where it is missing or no integer >= ``least``."""
    value = get(config, key, default)
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CheckpointError(f"config.json: {key} must be an integer >= {least}, got {value!r}")
    return value


def check_model_type(config: Mapping[str, Any], wanted: str) -> None:
    """Refuse a config of another family."""
    kind = config.get("model_type")
    if kind != wanted:
        raise CheckpointError(f"config.json: model_type is {kind!r}, expected {wanted!r}")


def check_bound(key: str, value: Any) -> None:
    """Refuse a lower bound of log decays that is not negative."""
    if value is not None and not value < 0:
        raise CheckpointError(f"config.json: {key} must be negative, got {value}")


def refuse(features: Iterable[tuple[str, Any, bool, str]]) -> None:
    """Raise CheckpointError for the first feature that is asked for: (key, value, asked, what)."""
    for key, value, asked, what in features:
        if asked:
            raise CheckpointError(f"config.json: {key}={value!r} ({what}) is not supported")
