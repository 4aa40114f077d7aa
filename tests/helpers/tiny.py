"""The tiny random Kimi Linear model of the cases: four layers, vocabulary 128, float32.

KDA, KDA, KDA, MLA; KDA 4 heads x 32; MLA nope 32, rope 32, v 32, latents 32; 8 experts, top 2.
dt_bias ~ U(-4, 1) per channel and wide convolution weights, so that a wrong state is not noise.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import kimi_linear as stock

from mlx_kda.models.hybrid import Model
from mlx_kda.models.hybrid_config import DENSE, KDA
from mlx_kda.models.kimi_linear import ModelArgs

VOCAB = 128


def tiny_config(**changes) -> dict:
    """config.json in the hub's dialect; keys of linear_attn_config may be changed by name too."""
    linear = {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    }
    linear.update({k: changes.pop(k) for k in list(changes) if k in linear})
    config = {
        "model_type": "kimi_linear",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "mla_use_nope": True,
        "linear_attn_config": linear,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "num_expert_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "model_max_length": 1048576,
        "tie_word_embeddings": False,
    }
    return {**config, **changes}


def tiny_weights(config: dict, seed: int = 0) -> dict[str, mx.array]:
    """Random float32 weights under the MLX names, numpy's generator: the same on every machine."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, p in sorted(tree_flatten(Model(ModelArgs.from_dict(config)).parameters())):
        if name.endswith("dt_bias"):
            w = rng.uniform(-4.0, 1.0, p.shape)
        elif name.endswith("A_log"):
            w = rng.uniform(0.0, 2.0, p.shape)
        elif name.endswith("e_score_correction_bias"):
            w = rng.uniform(-0.3, 0.3, p.shape)
        elif "norm" in name:
            w = rng.uniform(0.5, 1.5, p.shape)
        elif name.endswith("conv.weight"):
            w = rng.standard_normal(p.shape) * 6 * p.shape[1] ** -1.0
        elif "embed_tokens" in name:
            w = rng.standard_normal(p.shape)
        else:
            w = rng.standard_normal(p.shape) * p.shape[-1] ** -0.5
        weights[name] = mx.array(w.astype(np.float32))
    return weights


def tiny_model(seed: int = 0, **changes) -> Model:
    """The model with ``tiny_weights``."""
    config = tiny_config(**changes)
    model = Model(ModelArgs.from_dict(config))
    model.update(tree_unflatten(list(tiny_weights(config, seed).items())))
    mx.eval(model.parameters())
    return model.eval()


def stock_model(config: dict, weights: dict[str, mx.array], latent_eps: float = 1e-6):
    """mlx-lm's own model with the same weights.

    It gives the norm of the MLA latents rms_norm_eps; the published model code has 1e-6 there, and
    so has the model under test. ``latent_eps`` None leaves mlx-lm as it is.
    """
    model = stock.Model(stock.ModelArgs.from_dict(stock_config(config)))
    model.load_weights(list(weights.items()))
    if latent_eps is not None:
        for layer in model.layers:
            if not layer.is_linear:
                layer.self_attn.kv_a_layernorm.eps = latent_eps
    return model.eval()


def stock_config(config: dict) -> dict:
    """config.json as stock mlx-lm needs it: the hub's dialect, whatever ``config`` is in."""
    read = ModelArgs.from_dict(config)
    kda = [i + 1 for i, kind in enumerate(read.layer_types) if kind == KDA]
    return {
        **tiny_config(),
        **{key: value for key, value in vars(read).items() if key in tiny_config()},
        "num_hidden_layers": read.num_hidden_layers,
        "first_k_dense_replace": read.mlp_layer_types.count(DENSE),
        "head_dim": read.qk_nope_head_dim,
        "linear_attn_config": {
            "kda_layers": kda,
            "num_heads": read.linear_num_heads,
            "head_dim": read.linear_head_dim,
            "short_conv_kernel_size": read.linear_conv_kernel_dim,
        },
    }


def write_model(folder: Path, config: dict, weights: dict[str, mx.array], shards: int = 1) -> Path:
    """A checkpoint folder of MLX's layout: config.json, shards, and an index if more than one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        return folder
    names, place = sorted(weights), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        mx.save_safetensors(str(folder / file), {n: weights[n] for n in part}, {"format": "mlx"})
        place |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def tokens(n: int, seed: int = 0, vocab: int = VOCAB) -> mx.array:
    """[1, n] random token ids."""
    return mx.array(np.random.default_rng(seed).integers(0, vocab, (1, n)))


def run(model, ids: mx.array, parts: list[int] | None = None, cache: list | None = None):
    """Logits [B, T, vocab] of ``ids`` fed in parts of the given lengths, through one cache."""
    cache = model.make_cache() if cache is None else cache
    out, at = [], 0
    for part in parts or [ids.shape[1]]:
        out.append(model(ids[:, at : at + part], cache=cache))
        mx.eval(out[-1], [c.state for c in cache])
        at += part
    assert at == ids.shape[1]
    return mx.concatenate(out, axis=1)


def difference(x: mx.array, y: mx.array) -> float:
    """Largest difference over the largest magnitude of ``y``; infinite where x is not finite."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if not np.isfinite(x).all():
        return float("inf")
    return float(np.abs(x - y).max() / np.abs(y).max())
