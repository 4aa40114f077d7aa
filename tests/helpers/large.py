"""A random checkpoint of any size, written layer by layer, to measure what a conversion takes."""

import json
from pathlib import Path

import mlx.core as mx

from .tiny_checkpoint import CONFIG, VOCABULARY

HEADS, DIM = CONFIG["linear_attn_config"]["num_heads"], CONFIG["linear_attn_config"]["head_dim"]
NOPE, ROPE, VALUE = CONFIG["qk_nope_head_dim"], CONFIG["qk_rope_head_dim"], CONFIG["v_head_dim"]
LATENT, DENSE = CONFIG["kv_lora_rank"], CONFIG["intermediate_size"]


def write_large(folder: Path, layers: int, hidden: int, inner: int, experts: int) -> list[int]:
    """Write a bfloat16 checkpoint, a file a layer, every fourth layer MLA; bytes of each file."""
    folder.mkdir(parents=True, exist_ok=True)
    kda = [i + 1 for i in range(layers) if i % 4 != 3]
    full = [i + 1 for i in range(layers) if i % 4 == 3]
    linear = CONFIG["linear_attn_config"] | {"kda_layers": kda, "full_attn_layers": full}
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": experts}
    config = CONFIG | sizes | {"num_hidden_layers": layers, "linear_attn_config": linear}
    config |= {"num_shared_experts": 0, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    index: dict[str, str] = {}
    written = []
    for part in range(layers + 1):
        shapes = _layer(part, part + 1 in kda, hidden, inner, experts)
        if part == layers:
            shapes = {
                "model.embed_tokens.weight": (VOCABULARY, hidden),
                "model.norm.weight": (hidden,),
                "lm_head.weight": (VOCABULARY, hidden),
            }
        tensors = {name: _draw(name, shape) for name, shape in shapes.items()}
        file = f"model-{part + 1:05d}-of-{layers + 1:05d}.safetensors"
        mx.save_safetensors(str(folder / file), tensors, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        written.append(sum(tensor.nbytes for tensor in tensors.values()))
        mx.clear_cache()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return written


def _draw(name: str, shape: tuple[int, ...]) -> mx.array:
    if name.endswith(("A_log", "dt_bias", "correction_bias")):
        return mx.random.uniform(-1, 1, shape)
    return (mx.random.normal(shape) * shape[-1] ** -0.5).astype(mx.bfloat16)


def _layer(i: int, kda: bool, hidden: int, inner: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer, as the hub has them."""
    layer, width = f"model.layers.{i}", HEADS * DIM
    attention: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (HEADS * (NOPE + ROPE), hidden),
        "kv_a_proj_with_mqa.weight": (LATENT + ROPE, hidden),
        "kv_a_layernorm.weight": (LATENT,),
        "kv_b_proj.weight": (HEADS * (NOPE + VALUE), LATENT),
        "o_proj.weight": (hidden, HEADS * VALUE),
    }
    if kda:
        attention = {f"{x}_proj.weight": (width, hidden) for x in "qkv"}
        attention |= {f"{x}_conv1d.weight": (width, 1, 4) for x in "qkv"}
        attention |= {f"{x}_a_proj.weight": (DIM, hidden) for x in "fg"}
        attention |= {f"{x}_b_proj.weight": (width, DIM) for x in "fg"}
        attention |= {"b_proj.weight": (HEADS, hidden), "o_proj.weight": (hidden, width)}
        attention |= {"A_log": (1, 1, HEADS, 1), "dt_bias": (width,), "o_norm.weight": (DIM,)}
    shapes = {f"{layer}.self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {f"{layer}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    if i == 0:
        up = {f"{layer}.mlp.{n}_proj.weight": (DENSE, hidden) for n in ("gate", "up")}
        return shapes | up | {f"{layer}.mlp.down_proj.weight": (hidden, DENSE)}
    moe = f"{layer}.block_sparse_moe"
    shapes[f"{moe}.gate.weight"] = (experts, hidden)
    shapes[f"{moe}.gate.e_score_correction_bias"] = (experts,)
    for e in range(experts):
        shapes |= {f"{moe}.experts.{e}.{w}.weight": (inner, hidden) for w in ("w1", "w3")}
        shapes[f"{moe}.experts.{e}.w2.weight"] = (hidden, inner)
    return shapes
