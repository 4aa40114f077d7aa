"""A model with the layers of a released one and random weights: nothing to download."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..layers import MoE
from ..layers.blas_layout import lay_out

# Layers counted from 1, as in config.json; every fourth one is MLA, and the 48B's last.
_FULL = (4, 8, 12, 16, 20, 24, 27)
SHAPES = {
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
        "linear_attn_config": {
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    }
}


def config(shape: str, layers: int | None = None, vocab: int | None = None) -> dict[str, Any]:
    """config.json of a shape, with its first ``layers`` and another vocabulary if asked."""
    made = dict(SHAPES[shape])
    layers = min(layers or made["num_hidden_layers"], made["num_hidden_layers"])
    full = [i for i in _FULL if i <= layers]
    kda = [i for i in range(1, layers + 1) if i not in full]
    made["num_hidden_layers"] = layers
    made["vocab_size"] = vocab or made["vocab_size"]
    layout = {"kda_layers": kda, "full_attn_layers": full}
    made["linear_attn_config"] = made["linear_attn_config"] | layout
    return made


def random_model(
    shape: str,
    *,
    layers: int | None = None,
    vocab: int | None = None,
    dtype: mx.Dtype = mx.bfloat16,
    q_bits: int | None = None,
    runner: str = "auto",
) -> nn.Module:
    """The model, ready to run, its weights drawn a layer at a time.

    Args:
        shape: a key of `SHAPES`.
        layers, vocab: fewer layers, another vocabulary; the shape's own unless given.
        dtype: of the weights; gate parameters and the router stay float32.
        q_bits: quantise by mlx-lm's rule, in groups of 64; not unless given.
        runner: what computes the KDA layers.
    """
    from ..models.hybrid import Model
    from ..models.kimi_linear import ModelArgs

    model = Model(ModelArgs.from_dict(config(shape, layers, vocab)))
    model.runner = runner
    pack(model, dtype, q_bits)
    as_loaded(model)
    _draw(model)
    lay_out(model)
    model.merge()
    return model.eval()


def stock_model(
    shape: str,
    *,
    layers: int | None = None,
    vocab: int | None = None,
    dtype: mx.Dtype = mx.bfloat16,
    q_bits: int | None = None,
) -> nn.Module:
    """mlx-lm's model of the same shape, with random weights of its own (see `random_model`)."""
    from mlx_lm.models.kimi_linear import Model, ModelArgs

    model = Model(ModelArgs.from_dict(config(shape, layers, vocab)))
    pack(model, dtype, q_bits)
    _draw(model)
    return model.eval()


def pack(model: nn.Module, dtype: mx.Dtype, q_bits: int | None) -> None:
    """Give every weight a dtype, and quantise by mlx-lm's rule if asked."""
    model.set_dtype(dtype)
    if q_bits:
        nn.quantize(model, 64, q_bits, class_predicate=quantisable(model))


def _draw(model: nn.Module) -> None:
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())


def as_loaded(model: nn.Module) -> None:
    """Router and gate parameters in float32, as the loader leaves them."""
    for layer in model.layers:
        if layer.is_linear:
            attn = layer.self_attn
            attn.A_log, attn.dt_bias = (w.astype(mx.float32) for w in (attn.A_log, attn.dt_bias))
        if isinstance(layer.mlp, MoE):
            bias = layer.mlp.e_score_correction_bias
            layer.mlp.e_score_correction_bias = bias.astype(mx.float32)
            layer.mlp.gate.apply(
                lambda w: w.astype(mx.float32) if mx.issubdtype(w.dtype, mx.floating) else w
            )


def quantisable(model: nn.Module) -> Callable[[str, nn.Module], bool | dict]:
    """What `nn.quantize` may pack: the model's own rule, for layers that can be packed."""
    rule = model.quant_predicate

    def allowed(path: str, module: nn.Module) -> bool | dict:
        return hasattr(module, "to_quantized") and rule(path, module)

    return allowed
