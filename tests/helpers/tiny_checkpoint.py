"""A small random Kimi Linear checkpoint as a hub repository holds it, made without torch.

Four layers (KDA, KDA, KDA, MLA), the first dense and the rest MoE; a tokenizer of the 256 bytes
and some merges in tiktoken's form; the Kimi control tokens and chat template.
"""

import base64
import json
from pathlib import Path

import mlx.core as mx

MERGES = (b"th", b"the", b" t", b"in", b"er", b" the", b"an", b"  ")
RANKS = [bytes([b]) for b in range(256)] + list(MERGES)
SPECIALS = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "[UNK]",
    "[PAD]",
)
SPECIAL_IDS = {name: len(RANKS) + i for i, name in enumerate(SPECIALS)}
VOCABULARY = 288
TEMPLATE = (
    "{% for m in messages %}<|im_{{ m['role'] }}|>{{ m['role'] }}<|im_middle|>"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
LAYERS, HIDDEN, HEADS, DIM, EXPERTS, EXPERT_SIZE, LATENT, DENSE = 4, 64, 2, 32, 8, 32, 32, 128

CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "head_dim": DIM,
    "intermediate_size": DENSE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "q_lora_rank": None,
    "qk_nope_head_dim": DIM,
    "qk_rope_head_dim": DIM,
    "v_head_dim": DIM,
    "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": HEADS,
        "head_dim": DIM,
        "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": EXPERTS,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": EXPERT_SIZE,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "model_max_length": 512,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": SPECIAL_IDS["[BOS]"],
    "eos_token_id": SPECIAL_IDS["[EOS]"],
}


def write_checkpoint(
    folder: Path, *, seed: int = 0, tensors: dict[str, mx.array] | None = None, **config: object
) -> Path:
    """Write the checkpoint, or other ``tensors``, into ``folder`` in two shards; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _json(folder / "config.json", {**CONFIG, **config})
    write_weights(folder, weights(seed) if tensors is None else tensors)
    write_tokenizer(folder)
    return folder


def weights(seed: int = 0) -> dict[str, mx.array]:
    """Random tensors under the hub's names, float32."""
    key = mx.random.key(seed)

    def draw(*shape: int, scale: float | None = None, low: float = 0.0, high: float = 0.0):
        nonlocal key
        key, sub = mx.random.split(key)
        if low != high:
            return mx.random.uniform(low, high, shape, key=sub)
        return mx.random.normal(shape, key=sub) * (shape[-1] ** -0.5 if scale is None else scale)

    width = HEADS * DIM
    out = {
        "model.embed_tokens.weight": draw(VOCABULARY, HIDDEN, scale=1.0),
        "model.norm.weight": draw(HIDDEN, low=0.5, high=1.5),
        "lm_head.weight": draw(VOCABULARY, HIDDEN, scale=0.5),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        attn, moe, mlp = f"{layer}.self_attn", f"{layer}.block_sparse_moe", f"{layer}.mlp"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{layer}.{norm}.weight"] = draw(HIDDEN, low=0.5, high=1.5)
        if i < LAYERS - 1:
            for name in "qkv":
                out[f"{attn}.{name}_proj.weight"] = draw(width, HIDDEN)
                out[f"{attn}.{name}_conv1d.weight"] = draw(width, 1, 4, scale=1.5)
            for low, high in (("f_a", "f_b"), ("g_a", "g_b")):
                out[f"{attn}.{low}_proj.weight"] = draw(DIM, HIDDEN)
                out[f"{attn}.{high}_proj.weight"] = draw(width, DIM)
            out[f"{attn}.b_proj.weight"] = draw(HEADS, HIDDEN)
            out[f"{attn}.A_log"] = draw(1, 1, HEADS, 1, low=0.0, high=1.0)
            out[f"{attn}.dt_bias"] = draw(width, low=-4.0, high=1.0)
            out[f"{attn}.o_norm.weight"] = draw(DIM, low=0.5, high=1.5)
        else:
            out[f"{attn}.q_proj.weight"] = draw(HEADS * 2 * DIM, HIDDEN)
            out[f"{attn}.kv_a_proj_with_mqa.weight"] = draw(LATENT + DIM, HIDDEN)
            out[f"{attn}.kv_a_layernorm.weight"] = draw(LATENT, low=0.5, high=1.5)
            out[f"{attn}.kv_b_proj.weight"] = draw(HEADS * 2 * DIM, LATENT)
        out[f"{attn}.o_proj.weight"] = draw(HIDDEN, width)
        if i == 0:
            sizes = {"gate_proj": (DENSE, HIDDEN), "up_proj": (DENSE, HIDDEN)}
            for name, shape in {**sizes, "down_proj": (HIDDEN, DENSE)}.items():
                out[f"{mlp}.{name}.weight"] = draw(*shape)
            continue
        out[f"{moe}.gate.weight"] = draw(EXPERTS, HIDDEN)
        out[f"{moe}.gate.e_score_correction_bias"] = draw(EXPERTS, low=-0.1, high=0.1)
        for e in range(EXPERTS):
            for name in ("w1", "w3"):
                out[f"{moe}.experts.{e}.{name}.weight"] = draw(EXPERT_SIZE, HIDDEN)
            out[f"{moe}.experts.{e}.w2.weight"] = draw(HIDDEN, EXPERT_SIZE)
        for name in ("gate_proj", "up_proj"):
            out[f"{moe}.shared_experts.{name}.weight"] = draw(EXPERT_SIZE, HIDDEN)
        out[f"{moe}.shared_experts.down_proj.weight"] = draw(HIDDEN, EXPERT_SIZE)
    return out


def write_weights(folder: Path, tensors: dict[str, mx.array], shards: int = 2) -> None:
    """Replace a folder's weights by ``tensors`` in shards with an index, as the hub has them."""
    for old in folder.glob("model*"):
        old.unlink()
    names = list(tensors)
    step = -(-len(names) // shards)
    index = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i * step : (i + 1) * step]
        mx.save_safetensors(str(folder / file), {n: tensors[n] for n in part}, {"format": "pt"})
        index.update(dict.fromkeys(part, file))
    total = sum(t.nbytes for t in tensors.values())
    _json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": index},
    )


def write_tokenizer(folder: Path) -> None:
    """Write tiktoken.model, tokenizer_config.json and generation_config.json."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(RANKS))
    (folder / "tiktoken.model").write_text("".join(lines))
    entry = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    _json(
        folder / "tokenizer_config.json",
        {
            "added_tokens_decoder": {
                str(i): {"content": name, "special": True, **entry}
                for name, i in SPECIAL_IDS.items()
            },
            "additional_special_tokens": list(SPECIALS[2:7]),
            "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1048576,
            "tokenizer_class": "TikTokenTokenizer",
        },
    )
    ends = [SPECIAL_IDS["[EOS]"], SPECIAL_IDS["<|im_end|>"]]
    _json(folder / "generation_config.json", {"eos_token_id": ends})


def _json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2))
