"""`bench launches`: kernels that one decode step of Kimi Linear 48B asks of a GPU.

Counted from the graph of a model with the 48B's layers and small matrices, whose number of launches
is the same; nothing is run.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .graph import as_on_metal, launches, state_arrays
from .shapes import as_loaded, config, pack

_48B = config("48b", vocab=128)
# Layers, experts chosen, convolution kernel and groups of the 48B; sizes that just quantise.
CONFIG = _48B | {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "head_dim": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "kv_lora_rank": 64,
    "num_experts": 16,
    "moe_intermediate_size": 64,
    "linear_attn_config": _48B["linear_attn_config"] | {"num_heads": 8, "head_dim": 64},
}


def run(q_bits: int | None = 4) -> Iterator[dict[str, Any]]:
    """One row a candidate: launches of one greedy decode step, and the commonest primitives."""
    with as_on_metal():
        for name, model in (
            ("ours", _ours()),
            ("ours, maps one by one", _ours()),
            ("ours, operations", _ours()),
            ("mlx-lm", _theirs()),
        ):
            pack(model, mx.bfloat16, q_bits)
            if name != "mlx-lm":
                as_loaded(model)
                model.merge("one by one" not in name)
                if "operations" not in name:
                    model.use_runner("metal", "to be counted")
            mx.eval(model.parameters())
            yield {"candidate": name, "q_bits": q_bits, **_count(model)}


def _ours() -> nn.Module:
    from ..models.hybrid import Model
    from ..models.kimi_linear import ModelArgs

    return Model(ModelArgs.from_dict(CONFIG)).eval()


def _theirs() -> nn.Module:
    from mlx_lm.models.kimi_linear import Model, ModelArgs

    return Model(ModelArgs.from_dict(CONFIG)).eval()


def _count(model: nn.Module) -> dict[str, Any]:
    cache = model.make_cache()
    _begin(model, cache)
    logits = model(mx.array([[1]]), cache=cache)
    token = mx.argmax(logits[:, -1], axis=-1)
    counts = launches([token, *state_arrays(cache)])
    return {"launches": counts.total(), "of": dict(counts.most_common())}


def _begin(model: nn.Module, cache: list[Any]) -> None:
    """A cache as after some tokens, without running any."""
    linear = CONFIG["linear_attn_config"]
    H, D = linear["num_heads"], linear["head_dim"]
    for layer, c in zip(model.layers, cache, strict=True):
        if layer.is_linear:
            for i in range(3):
                c[i] = mx.zeros((1, 3, H * D), dtype=mx.bfloat16)
            c[3] = mx.zeros((1, H, D, D))
            mx.eval([c[i] for i in range(4)])
        else:
            latents = mx.zeros((1, 1, 5, CONFIG["kv_lora_rank"]), dtype=mx.bfloat16)
            shared = mx.zeros((1, 1, 5, CONFIG["qk_rope_head_dim"]), dtype=mx.bfloat16)
            c.update_and_fetch(latents, shared)
            mx.eval(c.state)
