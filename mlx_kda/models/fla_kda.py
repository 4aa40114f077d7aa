"""Pure KDA models of Flash Linear Attention (model_type ``kda``): no layer's memory grows.

Every layer is KDA with a dense SwiGLU MLP. Unlike Kimi Linear's, the map to the output gate has a
bias; values may have more heads (``num_v_heads``) and another width (``expand_v``) than keys, the
write strength may reach 2 (``allow_neg_eigval``), and the decay may be bounded (``lower_bound``).

A missing key has the default of FLA's ``KDAConfig``. Keys that only say how FLA computes
(``attn_mode``, ``fuse_norm``, ``fuse_swiglu``, ``fuse_cross_entropy``, ``use_l2warp``,
``safe_gate`` beside a ``lower_bound``) or trains (``initializer_range``) are ignored; a feature
that changes the model and is not computed here is refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from .hybrid_config import (
    DENSE,
    KDA,
    HybridConfig,
    check_bound,
    check_model_type,
    get,
    integer,
    refuse,
)

# FLA rounds the width of its MLPs, where none is given, up to a multiple of this.
_MLP_MULTIPLE = 256


@dataclass(frozen=True)
class FlaKdaConfig(HybridConfig):
    """Shapes and rules of one pure KDA model: every layer KDA, every MLP dense."""

    output_gate_bias: bool = True
    model_type: str = "kda"

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "FlaKdaConfig":
        check_model_type(config, cls.model_type)
        _refuse_unsupported(config)
        layers = integer(config, "num_hidden_layers", 24)
        hidden = integer(config, "hidden_size", 2048)
        heads, dim = integer(config, "num_heads", 16), integer(config, "head_dim", 128)
        return cls(
            vocab_size=integer(config, "vocab_size", 32000),
            hidden_size=hidden,
            layer_types=(KDA,) * layers,
            mlp_layer_types=(DENSE,) * layers,
            intermediate_size=_mlp_width(config, hidden),
            rms_norm_eps=float(get(config, "norm_eps", 1e-6)),
            model_max_length=integer(config, "max_position_embeddings", 2048),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            linear_num_heads=heads,
            linear_head_dim=dim,
            linear_num_v_heads=_value_heads(config, heads),
            linear_v_head_dim=_value_dim(config, dim),
            linear_conv_kernel_dim=integer(config, "conv_size", 4),
            gate_lower_bound=_lower_bound(config),
            allow_neg_eigval=bool(config.get("allow_neg_eigval", False)),
        )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for the first feature that this package does not compute."""
    act = get(config, "hidden_act", "swish")
    short = get(config, "use_short_conv", True)
    refuse(
        (key, config.get(key), asked, what)
        for key, asked, what in [
            ("attn", bool(config.get("attn")), "softmax attention layers"),
            ("use_short_conv", not short, "no short convolution"),
            ("conv_bias", bool(config.get("conv_bias")), "biases in convolutions"),
            ("hidden_act", act not in ("swish", "silu"), "activation"),
            (
                "attnres_block_size",
                config.get("attnres_block_size") is not None,
                "attention residuals",
            ),
        ]
    )


def _mlp_width(config: Mapping[str, Any], hidden: int) -> int:
    """``intermediate_size``, or two thirds of ``hidden_ratio`` times hidden, rounded up."""
    if config.get("intermediate_size") is not None:
        return integer(config, "intermediate_size", None)
    ratio = get(config, "hidden_ratio", 4)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < math.inf:
        raise CheckpointError(f"config.json: hidden_ratio must be above 0, got {ratio!r}")
    return -(-int(hidden * ratio * 2 / 3) // _MLP_MULTIPLE) * _MLP_MULTIPLE


def _value_heads(config: Mapping[str, Any], heads: int) -> int:
    count = integer(config, "num_v_heads", heads)
    if count % heads:
        raise CheckpointError(
            f"config.json: num_v_heads must be a multiple of num_heads = {heads}, got {count}"
        )
    return count


def _value_dim(config: Mapping[str, Any], dim: int) -> int:
    expand = get(config, "expand_v", 1.0)
    right = isinstance(expand, int | float) and not isinstance(expand, bool) and expand > 0
    width = int(dim * expand) if right and expand < math.inf else 0
    if not width or not math.isclose(dim * expand, width, rel_tol=1e-5):
        raise CheckpointError(
            f"config.json: expand_v must make head_dim = {dim} a whole number, got {expand!r}"
        )
    return width


def _lower_bound(config: Mapping[str, Any]) -> float | None:
    """FLA goes by ``lower_bound`` alone; ``safe_gate`` says that its kernels may rely on it."""
    bound = config.get("lower_bound")
    if bound is None and config.get("safe_gate"):
        raise CheckpointError("config.json: safe_gate needs a lower_bound, which is missing")
    check_bound("lower_bound", bound)
    return None if bound is None else float(bound)


ModelArgs = FlaKdaConfig


def own_config(raw: dict[str, Any], config: FlaKdaConfig) -> tuple[dict[str, Any], list[str]]:
    """config.json in FLA's dialect, and a warning: stock mlx-lm has no such model.

    FLA's defaults that the source relied on are written out; other keys of ``raw`` are kept.
    """
    heads, value_dim, dim = config.linear_state_shape
    result = raw | {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.model_max_length,
        "tie_word_embeddings": config.tie_word_embeddings,
        "num_heads": config.linear_num_heads,
        "head_dim": dim,
        "num_v_heads": heads,
        "expand_v": value_dim / dim,
        "conv_size": config.linear_conv_kernel_dim,
        "lower_bound": config.gate_lower_bound,
        "allow_neg_eigval": config.allow_neg_eigval,
    }
    warning = f"stock mlx-lm has no model_type {config.model_type} and does not load this model"
    return result, [warning]
