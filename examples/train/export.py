"""Write a trained piece as a Hugging Face hub folder.

    python export.py --weights OUT --data ../../.train --to ../tiny-kimi-linear
    python export.py --weights OUT --data ../../.train --to ../tiny-fla-kda --family kda

Kimi Linear: two safetensors shards (bfloat16; A_log, dt_bias and the router's correction bias
float32), their index, config.json in the hub's dialect, the tokenizer, the chat template and
generation_config.json. Pure KDA: one shard in FLA's names, config.json of model_type kda and
the sentencepiece tokenizer. The model cards are written by hand; measure.py fills in numbers.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from chat import SentencePieceTokenizer, Tokenizer
from model import Config, pure_kda
from safetensors.torch import load_file, save_file

KEPT_FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias")
CONTEXT = 1048576
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' -}}
{{- message['content'] + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_assistant|>assistant<|im_middle|>' -}}
{%- endif -%}
"""


def hub_tensors(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The hub's names and dtypes: experts one by one, everything else as trained."""
    tensors = {}
    for name, tensor in weights.items():
        if name.rsplit(".", 1)[-1] in ("w1", "w2", "w3"):
            stem, which = name.rsplit(".", 1)
            for number, expert in enumerate(tensor):
                tensors[f"{stem}.{number}.{which}.weight"] = expert.bfloat16().contiguous()
        else:
            keep = name.endswith(KEPT_FLOAT32)
            tensors[name] = tensor.float() if keep else tensor.bfloat16()
    return tensors


def hub_config(c: Config, tokenizer: Tokenizer) -> dict:
    """config.json in the hub's dialect (layer numbers count from 1)."""
    full = [n + 1 for n in c.full_attention]
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.end,
        "pad_token_id": tokenizer.pad,
        "dtype": "bfloat16",
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "hidden_act": "silu",
        "intermediate_size": c.dense_hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.heads,
        "head_dim": c.nope + c.rope,
        "initializer_range": 0.02,
        "rms_norm_eps": c.eps,
        "tie_word_embeddings": False,
        "use_cache": True,
        "model_max_length": CONTEXT,
        "mla_use_nope": True,
        "q_lora_rank": None,
        "kv_lora_rank": c.kv_lora,
        "qk_nope_head_dim": c.nope,
        "qk_rope_head_dim": c.rope,
        "v_head_dim": c.v_dim,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [n for n in range(1, c.layers + 1) if n not in full],
            "head_dim": c.head_dim,
            "num_heads": c.heads,
            "short_conv_kernel_size": c.conv,
        },
        "first_k_dense_replace": c.dense_layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": c.expert_hidden,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "num_experts": c.experts,
        "num_experts_per_token": c.top_k,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "routed_scaling_factor": c.routed_scale,
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
    }


def added_tokens(special: dict[str, int]) -> dict:
    """`added_tokens_decoder` of a tokenizer_config.json: what each control token is."""
    return {
        str(number): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for name, number in special.items()
    }


def tokenizer_config(tokenizer: Tokenizer) -> dict:
    """tokenizer_config.json: the named special tokens, as the hub lists them."""
    named = {name: number for name, number in tokenizer.special.items() if "reserved" not in name}
    added = added_tokens(named)
    shown = ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": list(shown),
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "tokenizer_class": "TikTokenTokenizer",
        "chat_template": CHAT_TEMPLATE,
    }


FLA_NAMES = (
    ("embed_tokens", "embeddings"),
    ("self_attn", "attn"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "mlp_norm"),
    ("f_a_proj", "f_proj.0"),
    ("f_b_proj", "f_proj.1"),
    ("g_a_proj", "g_proj.0"),
    ("g_b_proj", "g_proj.1"),
)
PURE_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def fla_tensors(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """FLA's names and shapes; A_log [H] and dt_bias stay float32."""
    tensors = {}
    for name, tensor in weights.items():
        for ours, theirs in FLA_NAMES:
            name = name.replace(f".{ours}.", f".{theirs}.")
        keep = name.endswith(KEPT_FLOAT32)
        tensor = tensor.flatten() if name.endswith("A_log") else tensor
        tensors[name] = tensor.float() if keep else tensor.bfloat16()
    return tensors


def fla_config(c: Config, tokenizer: SentencePieceTokenizer) -> dict:
    """config.json as FLA's KDAConfig writes it."""
    return {
        "architectures": ["KDAForCausalLM"],
        "model_type": "kda",
        "allow_neg_eigval": False,
        "attn": None,
        "attn_mode": "chunk",
        "bos_token_id": tokenizer.bos,
        "conv_size": c.conv,
        "dtype": "bfloat16",
        "eos_token_id": tokenizer.eos,
        "expand_v": 1.0,
        "fuse_cross_entropy": True,
        "fuse_norm": True,
        "fuse_swiglu": True,
        "head_dim": c.head_dim,
        "hidden_act": "swish",
        "hidden_ratio": 4,
        "hidden_size": c.hidden,
        "initializer_range": 0.02,
        "intermediate_size": c.dense_hidden,
        "lower_bound": None,
        "max_position_embeddings": CONTEXT,
        "norm_eps": c.eps,
        "num_heads": c.heads,
        "num_hidden_layers": c.layers,
        "num_v_heads": None,
        "pad_token_id": None,
        "safe_gate": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_l2warp": False,
        "use_short_conv": True,
        "vocab_size": c.vocab,
    }


def pure_tokenizer_config(tokenizer: SentencePieceTokenizer) -> dict:
    """tokenizer_config.json of the sentencepiece model."""
    return {
        "added_tokens_decoder": added_tokens(tokenizer.special),
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": list(SentencePieceTokenizer.MARKS),
        "bos_token": "<s>",
        "eos_token": "<|end|>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "legacy": False,
        "model_max_length": CONTEXT,
        "tokenizer_class": "LlamaTokenizer",
        "chat_template": PURE_TEMPLATE,
    }


def write_json(path: Path, value: dict) -> None:
    """Two-space indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 2) -> None:
    """Split in the order of the layers into files of about equal size, and write the index."""
    total = sum(t.nbytes for t in tensors.values())
    names = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    parts: list[dict[str, torch.Tensor]] = [{} for _ in names]
    place, used = {}, 0
    for name, tensor in tensors.items():
        number = min(shards - 1, used * shards // total)
        parts[number][name] = tensor.contiguous()
        place[name] = names[number]
        used += tensor.nbytes
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=Path, required=True, help="folder that train.py left")
    parser.add_argument("--data", type=Path, required=True, help="folder made by prepare.py")
    parser.add_argument("--to", type=Path, required=True, help="folder to write")
    parser.add_argument("--family", choices=("kimi", "kda"), default="kimi")
    args = parser.parse_args()
    state = json.loads((args.weights / "state.json").read_text())
    weights: dict[str, torch.Tensor] = {}
    for number in range(state["shards"]):
        weights |= load_file(args.weights / f"model-{number}.safetensors")
    args.to.mkdir(parents=True, exist_ok=True)
    write = {"kimi": write_kimi, "kda": write_kda}[args.family]
    write(args.to, args.data, order(weights))
    size = sum(f.stat().st_size for f in args.to.iterdir())
    print(f"wrote {args.to}: {size / 1e6:.1f} MB, step {state['step']}")


def write_kimi(to: Path, data: Path, weights: dict[str, torch.Tensor]) -> None:
    """The hub folder of Kimi Linear."""
    tokenizer = Tokenizer(data / "tiktoken.model")
    write_shards(to, hub_tensors(weights))
    write_json(to / "config.json", hub_config(Config(tokenizer.size), tokenizer))
    write_json(to / "tokenizer_config.json", tokenizer_config(tokenizer))
    generation = {
        "bos_token_id": tokenizer.bos,
        "eos_token_id": [tokenizer.eos, tokenizer.end],
        "max_length": CONTEXT,
        "pad_token_id": tokenizer.pad,
    }
    write_json(to / "generation_config.json", generation)
    (to / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    shutil.copyfile(data / "tiktoken.model", to / "tiktoken.model")


def write_kda(to: Path, data: Path, weights: dict[str, torch.Tensor]) -> None:
    """A folder as FLA's KDAForCausalLM.save_pretrained leaves it."""
    tokenizer = SentencePieceTokenizer(data / "tokenizer.model")
    save_file(fla_tensors(weights), to / "model.safetensors", metadata={"format": "pt"})
    (to / "model.safetensors").chmod(0o644)
    write_json(to / "config.json", fla_config(pure_kda(tokenizer.size), tokenizer))
    write_json(to / "tokenizer_config.json", pure_tokenizer_config(tokenizer))
    (to / "chat_template.jinja").write_text(PURE_TEMPLATE)
    stop = [tokenizer.eos, tokenizer.end]
    write_json(to / "generation_config.json", {"bos_token_id": 1, "eos_token_id": stop})
    shutil.copyfile(data / "tokenizer.model", to / "tokenizer.model")


def order(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Embedding first, then the layers by number, the final norm and the head last."""

    def key(name: str) -> tuple:
        parts = name.split(".")
        if "layers" in parts:
            return (1, int(parts[2]), name)
        return (0 if "embed" in name else 2, 0, name)

    return {name: weights[name] for name in sorted(weights, key=key)}


if __name__ == "__main__":
    main()
