"""A random Kimi Linear checkpoint of any size, written a tensor at a time, to convert."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_kda.bench.shapes import config
from mlx_kda.weights.safetensors import Spec
from mlx_kda.weights.safetensors_writer import write_file

HEADS, DIM, LATENT, DENSE = 8, 64, 128, 1024
POOL = 1 << 24  # random numbers drawn once; a tensor is a piece of them


def write_synthetic(
    folder: Path,
    layers: int = 40,
    experts: int = 64,
    hidden: int = 512,
    inner: int = 512,
    shards: int = 8,
    vocabulary: int = 32_000,
) -> int:
    """Write a bfloat16 checkpoint in the hub's names, every fourth layer MLA; bytes of tensors.

    The defaults make 4 GB.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = (layers, experts, hidden, inner, vocabulary)
    shapes = dict(_shapes(*sizes))
    specs = {
        name: Spec(
            shape, mx.float32 if name.endswith(("A_log", "dt_bias", "bias")) else mx.bfloat16
        )
        for name, shape in shapes.items()
    }
    total = sum(spec.nbytes for spec in specs.values())
    pool = mx.random.normal((POOL,), key=mx.random.key(0))
    mx.eval(pool)
    parts: list[dict[str, Spec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if size >= total / shards and len(parts) < shards:
            parts.append({})
            size = 0
        parts[-1][name] = spec
        size += spec.nbytes
    placed = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        arrays = ((name, _draw(pool, name, spec)) for name, spec in part.items())
        write_file(folder / file, part, arrays, {"format": "pt"})
        placed |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_config(*sizes)))
    return total


def _draw(pool: mx.array, name: str, spec: Spec) -> mx.array:
    start, count = zlib.crc32(name.encode()) % (POOL // 2), spec.size
    if start + count <= POOL:
        flat = pool[start : start + count]
    else:
        flat = mx.concatenate([pool[start:], *[pool] * (count // POOL + 1)])[:count]
    return (flat.reshape(spec.shape) * spec.shape[-1] ** -0.5).astype(spec.dtype)


def _shapes(
    layers: int, experts: int, hidden: int, inner: int, vocabulary: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = HEADS * DIM
    full = config("48b", layers)["linear_attn_config"]["full_attn_layers"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for i in range(layers):
        path = f"model.layers.{i}"
        attn, moe = f"{path}.self_attn", f"{path}.block_sparse_moe"
        yield f"{path}.input_layernorm.weight", (hidden,)
        yield f"{path}.post_attention_layernorm.weight", (hidden,)
        if i + 1 in full:
            yield f"{attn}.q_proj.weight", (2 * width, hidden)
            yield f"{attn}.kv_a_proj_with_mqa.weight", (LATENT + DIM, hidden)
            yield f"{attn}.kv_a_layernorm.weight", (LATENT,)
            yield f"{attn}.kv_b_proj.weight", (2 * width, LATENT)
        else:
            for part in "qkv":
                yield f"{attn}.{part}_proj.weight", (width, hidden)
                yield f"{attn}.{part}_conv1d.weight", (width, 1, 4)
            for part in "fg":
                yield f"{attn}.{part}_a_proj.weight", (DIM, hidden)
                yield f"{attn}.{part}_b_proj.weight", (width, DIM)
            yield f"{attn}.b_proj.weight", (HEADS, hidden)
            yield f"{attn}.A_log", (1, 1, HEADS, 1)
            yield f"{attn}.dt_bias", (width,)
            yield f"{attn}.o_norm.weight", (DIM,)
        yield f"{attn}.o_proj.weight", (hidden, width)
        if i == 0:
            for part in ("gate", "up"):
                yield f"{path}.mlp.{part}_proj.weight", (DENSE, hidden)
            yield f"{path}.mlp.down_proj.weight", (hidden, DENSE)
            continue
        yield f"{moe}.gate.weight", (experts, hidden)
        yield f"{moe}.gate.e_score_correction_bias", (experts,)
        for e in range(experts):
            for part in ("w1", "w3"):
                yield f"{moe}.experts.{e}.{part}.weight", (inner, hidden)
            yield f"{moe}.experts.{e}.w2.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def _config(layers: int, experts: int, hidden: int, inner: int, vocabulary: int) -> dict[str, Any]:
    return config(
        "48b",
        layers,
        vocab_size=vocabulary,
        hidden_size=hidden,
        head_dim=DIM,
        intermediate_size=DENSE,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        kv_lora_rank=LATENT,
        q_lora_rank=None,
        qk_nope_head_dim=DIM,
        qk_rope_head_dim=DIM,
        v_head_dim=DIM,
        linear_attn_config={"num_heads": HEADS, "head_dim": DIM},
        num_experts=experts,
        num_experts_per_token=min(8, experts),
        num_shared_experts=0,
        moe_intermediate_size=inner,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    )
