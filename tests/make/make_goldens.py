"""Makes tests/goldens: tiny random Kimi Linear checkpoints and the logits of transformers for them.

Needs the extra ``dev`` (torch, transformers 5.24). Run ``python tests/make/make_goldens.py``; what
it writes is committed, and the tests read it without torch. The same seeds give the same files.

The logits are those of transformers' own forward pass carried out in float64: the module's casts
to float32 are turned into casts to float64, so that the truth does not carry float32's rounding.
"""

import json
import shutil
import types
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.models.kimi_linear import configuration_kimi_linear, modeling_kimi_linear

OUT = Path(__file__).parents[1] / "goldens"
VOCAB = 128


@dataclass(frozen=True)
class Golden:
    """One checkpoint: what differs from the base config, its dialect and how it is stored."""

    name: str
    hub: bool
    layers: str  # "k" KDA, "m" MLA, a layer each; upper case: dense MLP
    changes: dict = field(default_factory=dict)
    shard: str | None = None  # largest shard: two or more files and an index
    float32: bool = False
    seed: int = 0


BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-5,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "model_max_length": 1048576,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

# rms_norm_eps 1e-6 where stock mlx-lm is compared as well: it gives the norm of the latents that
# eps, transformers and the hub's code always 1e-6.
GOLDENS = [
    # The shape of the 48B model: dense first layer, every fourth layer MLA, one shared expert.
    Golden("hub-plain", True, "Kkkm", {"rms_norm_eps": 1e-6}, shard="60KB", seed=1),
    Golden("native-plain", False, "Kkkm", {"rms_norm_eps": 1e-6}, seed=2),
    # Expert groups, two shared experts; head size, nope, rope, value and latent widths all differ.
    Golden(
        "hub-groups",
        True,
        "KKmkm",
        {
            "num_experts": 12,
            "num_experts_per_token": 3,
            "num_expert_group": 4,
            "topk_group": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 8,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "v_head_dim": 24,
            "kv_lora_rank": 20,
            "linear_num_heads": 3,
            "linear_head_dim": 8,
            "routed_scaling_factor": 1.0,
        },
        seed=3,
    ),
    # No dense layer, MLA first, no renormalisation, groups of two, other taps, sharded.
    Golden(
        "native-groups",
        False,
        "mkkm",
        {
            "num_experts": 8,
            "num_experts_per_token": 4,
            "num_expert_group": 4,
            "topk_group": 3,
            "moe_renormalize": False,
            "moe_intermediate_size": 8,
            "linear_conv_kernel_dim": 3,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 16,
        },
        shard="60KB",
        seed=4,
    ),
    # One wide KDA head, more experts than ten (their order must be numeric), float32 weights.
    Golden(
        "hub-wide-head",
        True,
        "Kmk",
        {
            "linear_num_heads": 1,
            "linear_head_dim": 32,
            "num_experts": 11,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 8,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "kv_lora_rank": 32,
            "rms_norm_eps": 1e-6,
        },
        float32=True,
        seed=5,
    ),
    # All dense; and more MLA layers than KDA ones, two in a row, three shared experts.
    Golden("native-dense", False, "KKKM", {"linear_num_heads": 3, "linear_head_dim": 16}, seed=6),
    # Head sizes that the Metal kernels take: the emulator runs these from end to end.
    Golden("hub-head-64", True, "Kkm", {"linear_num_heads": 2, "linear_head_dim": 64}, seed=8),
    Golden(
        "native-head-32",
        False,
        "Kkmk",
        {"linear_num_heads": 3, "linear_head_dim": 32, "linear_conv_kernel_dim": 3},
        seed=9,
    ),
    Golden("hub-mostly-mla", True, "Kmmkm", {"num_shared_experts": 3, "hidden_size": 24}, seed=7),
]
PROMPTS = (70, 9, 1)  # more than one of transformers' chunks of 64, a short one, one token


def make(golden: Golden) -> None:
    """Write one checkpoint folder and its logits."""
    torch.manual_seed(golden.seed)
    config = configuration_kimi_linear.KimiLinearConfig(**config_of(golden))
    model = modeling_kimi_linear.KimiLinearForCausalLM(config).eval()
    randomise(model, golden)
    folder = OUT / golden.name
    shutil.rmtree(folder, ignore_errors=True)
    save(model, golden, folder)

    rng = np.random.default_rng(golden.seed)
    prompts = [rng.integers(0, VOCAB, size=n).tolist() for n in PROMPTS]
    model.double()
    model.set_experts_implementation("eager")  # the grouped one has no float64
    with torch.no_grad(), FloatIsDouble():
        logits = [model(torch.tensor([p])).logits[0].numpy() for p in prompts]
    assert all(x.dtype == np.float64 for x in logits)
    np.savez_compressed(
        folder / "golden.npz",
        tokens=np.concatenate(prompts).astype(np.int32),
        lengths=np.array(PROMPTS, dtype=np.int32),
        logits=np.concatenate(logits).astype(np.float32),
    )


def config_of(golden: Golden) -> dict:
    """The keyword arguments of transformers' config, in the golden's dialect."""
    config = {**BASE, **golden.changes}
    layers = golden.layers
    config["num_hidden_layers"] = len(layers)
    kda = [c in "kK" for c in layers]
    if not golden.hub:
        config["layer_types"] = ["linear_attention" if k else "full_attention" for k in kda]
        config["mlp_layer_types"] = ["dense" if c.isupper() else "sparse" for c in layers]
        return config
    return {
        **{k: v for k, v in config.items() if not k.startswith("linear_")},
        "linear_attn_config": {
            "kda_layers": [i + 1 for i, k in enumerate(kda) if k],
            "full_attn_layers": [i + 1 for i, k in enumerate(kda) if not k],
            "num_heads": config["linear_num_heads"],
            "head_dim": config["linear_head_dim"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        },
        "first_k_dense_replace": sum(c.isupper() for c in layers),
    }


def randomise(model, golden: Golden) -> None:
    """Weights at which a wrong state, gate or choice of experts shows in the logits."""
    gen = torch.Generator().manual_seed(golden.seed)
    uniform = lambda p, a, b: p.data.uniform_(a, b, generator=gen)  # noqa: E731
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("dt_bias"):
            uniform(p, -4.0, 1.0)
        elif name.endswith("A_log"):
            uniform(p, 0.0, 2.5)
        elif name.endswith("e_score_correction_bias"):
            uniform(p, -0.6, 0.6)  # some biased scores are negative: 0 does not mask a group
        elif "norm" in name:
            uniform(p, 0.5, 1.5)
        elif "conv1d" in name:
            p.data.normal_(generator=gen).mul_(6 * 0.2)
        elif "embed_tokens" in name:
            p.data.normal_(generator=gen)
        else:
            fan_in = p.shape[-1]
            p.data.normal_(generator=gen).mul_(fan_in**-0.5)
        if "kv_a_proj_with_mqa" in name:
            p.data.mul_(0.02)  # small latents: the eps of their norm is visible
        keep = golden.float32 or name.endswith(("dt_bias", "A_log", "e_score_correction_bias"))
        if not keep:
            p.data = p.data.to(torch.bfloat16).float()


def save(model, golden: Golden, folder: Path) -> None:
    """save_pretrained, then what the hub's own files have that it does not write."""
    if not golden.float32:
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if not name.endswith(
                ("dt_bias", "A_log", "e_score_correction_bias", "mlp.gate.weight")
            ):
                p.data = p.data.to(torch.bfloat16)
    model.config.dtype = torch.float32 if golden.float32 else torch.bfloat16
    model.save_pretrained(folder, max_shard_size=golden.shard or "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if golden.hub:
        to_hub(golden, folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def to_hub(golden: Golden, folder: Path) -> None:
    """The hub's config keys and its names for dense layers, over what save_pretrained wrote."""
    config = config_of(golden) | {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
        "torch_dtype": "float32" if golden.float32 else "bfloat16",
        "head_dim": BASE["qk_rope_head_dim"],
        "hidden_act": "silu",
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_grouped_topk": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    dense = [i for i, c in enumerate(golden.layers) if c.isupper()]

    def rename(name: str) -> str:
        for i in dense:
            name = name.replace(f"layers.{i}.block_sparse_moe.", f"layers.{i}.mlp.")
        return name

    for shard in folder.glob("*.safetensors"):
        tensors = {rename(k): v for k, v in load_file(shard).items()}
        save_file(tensors, shard, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        table = json.loads(index.read_text())
        table["weight_map"] = {rename(k): v for k, v in table["weight_map"].items()}
        index.write_text(json.dumps(table, indent=2) + "\n")


class FloatIsDouble:
    """While inside, transformers' Kimi Linear module casts to float64 where it says float32."""

    def __enter__(self):
        proxy = types.ModuleType("torch")
        proxy.__dict__.update(torch.__dict__)
        proxy.float32 = torch.float64
        self.float = torch.Tensor.float
        modeling_kimi_linear.torch = proxy
        torch.Tensor.float = torch.Tensor.double

    def __exit__(self, *error):
        modeling_kimi_linear.torch = torch
        torch.Tensor.float = self.float


if __name__ == "__main__":
    for each in GOLDENS:
        make(each)
        size = sum(f.stat().st_size for f in (OUT / each.name).iterdir())
        print(f"{each.name}: {size / 1024:.0f} KB")
