"""Write a trained piece as a Hugging Face hub folder of Kimi Linear.

    python export.py --weights OUT --data ../../.train --to ../tiny-kimi-linear

Two safetensors shards (bfloat16; A_log, dt_bias and the router's correction bias float32),
their index, config.json in the hub's dialect, the tokenizer, the chat template and
generation_config.json. The model card is written by hand; measure.py fills in its numbers.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from chat import Tokenizer
from model import Config
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


def tokenizer_config(tokenizer: Tokenizer) -> dict:
    """tokenizer_config.json: the named special tokens, as the hub lists them."""
    added = {
        str(number): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for name, number in tokenizer.special.items()
        if "reserved" not in name
    }
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
    args = parser.parse_args()
    state = json.loads((args.weights / "state.json").read_text())
    weights: dict[str, torch.Tensor] = {}
    for number in range(state["shards"]):
        weights |= load_file(args.weights / f"model-{number}.safetensors")
    tokenizer = Tokenizer(args.data / "tiktoken.model")
    args.to.mkdir(parents=True, exist_ok=True)
    write_shards(args.to, hub_tensors(order(weights)))
    write_json(args.to / "config.json", hub_config(Config(vocab=tokenizer.size), tokenizer))
    write_json(args.to / "tokenizer_config.json", tokenizer_config(tokenizer))
    stop = [tokenizer.eos, tokenizer.end]
    generation = {"bos_token_id": tokenizer.bos, "eos_token_id": stop, "max_length": CONTEXT}
    write_json(args.to / "generation_config.json", {**generation, "pad_token_id": tokenizer.pad})
    (args.to / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    shutil.copyfile(args.data / "tiktoken.model", args.to / "tiktoken.model")
    size = sum(f.stat().st_size for f in args.to.iterdir())
    print(f"wrote {args.to}: {size / 1e6:.1f} MB, step {state['step']}")


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
