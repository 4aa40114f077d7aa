"""The files beside the weights: config.json, tokenizer, generation settings, licences."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..files import new_file
from ..models import fla_kda_weights as fla_kda
from ..models.fla_kda import FlaKdaConfig
from ..models.hybrid_config import DENSE, KDA, MOE
from ..models.kimi_linear import KimiLinearConfig
from ..tokenizer import end_ids, read_tokenizer, write_tokenizer
from ..tokenizer.files import TokenizerFiles
from ..weights.source import CheckpointSource, read_json
from .report import ConversionReport, write_json

GENERATION = "generation_config.json"
# Remote code, settings of other quantisers, and keys that are written again.
DROPPED = {
    "auto_map",
    "quantization",
    "quantization_config",
    "_name_or_path",
    "transformers_version",
    "model_file",
    "dtype",
    "torch_dtype",
}
# Keys of transformers' dialect of Kimi Linear that the hub's keys replace.
NATIVE = {
    "layer_types",
    "mlp_layer_types",
    "linear_head_dim",
    "linear_num_heads",
    "linear_conv_kernel_dim",
    "num_local_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "n_group",
    "norm_topk_prob",
    "max_position_embeddings",
}


@dataclass
class AuxFiles:
    """Tokenizer (None if the source has none), generation settings, ids of the end tokens."""

    tokenizer: TokenizerFiles | None
    generation: dict[str, Any]
    eos_ids: list[int]


def read_aux_files(source: CheckpointSource) -> AuxFiles:
    """Read them from a source; CheckpointError where a file is damaged."""
    tokenizer = read_tokenizer(source.folder, source.config)
    path = source.folder / GENERATION
    generation = read_json(path) if path.is_file() else {}
    return AuxFiles(tokenizer, generation, end_ids(tokenizer, source.config, generation))


def write_aux_files(
    files: AuxFiles, source: CheckpointSource, folder: Path, report: ConversionReport
) -> None:
    """Write all but config.json to an output; the report gets what became of the tokenizer."""
    if files.tokenizer is None:
        report.warnings.append("the source has no tokenizer")
    else:
        report.tokenizer = write_tokenizer(files.tokenizer, folder, source.config)
    for path in sorted(source.folder.glob("LICENSE*")):
        if path.is_file():
            with new_file(folder / path.name) as temporary:
                shutil.copyfile(path, temporary)
    generation = dict(files.generation)
    if files.eos_ids:
        generation["eos_token_id"] = files.eos_ids
    if generation:
        write_json(folder / GENERATION, generation)


def output_config(
    raw: dict[str, Any],
    config: KimiLinearConfig | FlaKdaConfig,
    dtype: mx.Dtype,
    quantization: dict | None,
    eos_ids: list[int],
) -> tuple[dict[str, Any], list[str]]:
    """The config.json to write, and warnings about what stock mlx-lm does not understand.

    Kimi Linear's is in the hub's dialect, which mlx-lm reads. Unknown keys of the source are kept.
    ``quantization`` is in mlx-lm's form: a default and an entry for each weight that differs.
    """
    raw = {key: value for key, value in raw.items() if key not in DROPPED}
    if isinstance(config, FlaKdaConfig):
        result, warnings = fla_kda.own_config(raw, config)
    else:
        result, warnings = _hub_config(raw, config)
    result["torch_dtype"] = str(dtype).removeprefix("mlx.core.")
    if eos_ids:
        result["eos_token_id"] = eos_ids if len(eos_ids) > 1 else eos_ids[0]
    if quantization:
        result |= {"quantization": quantization, "quantization_config": quantization}
    return dict(sorted(result.items())), warnings


def _hub_config(raw: dict[str, Any], config: KimiLinearConfig) -> tuple[dict[str, Any], list[str]]:
    warnings = []
    first, freq = _dense_rule(config)
    types = list(enumerate(config.layer_types, start=1))
    linear = dict(raw.get("linear_attn_config") or {}) | {
        "kda_layers": [n for n, kind in types if kind == KDA],
        "full_attn_layers": [n for n, kind in types if kind != KDA],
        "num_heads": config.linear_num_heads,
        "head_dim": config.linear_head_dim,
        "short_conv_kernel_size": config.linear_conv_kernel_dim,
    }
    heads = config.num_attention_heads
    result = {key: value for key, value in raw.items() if key not in NATIVE}
    result |= {
        "model_type": config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or config.qk_nope_head_dim,
        "rope_theta": raw.get("rope_theta") or 10000.0,  # required by mlx-lm; nothing rotates
        "rms_norm_eps": config.rms_norm_eps,
        "linear_attn_config": linear,
        "mla_use_nope": True,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "kv_lora_rank": config.kv_lora_rank,
        "model_max_length": config.model_max_length,
        "tie_word_embeddings": config.tie_word_embeddings,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.num_experts_per_token,
        "num_shared_experts": config.num_shared_experts,
        "moe_intermediate_size": config.moe_intermediate_size,
        "moe_router_activation_func": config.moe_router_activation_func,
        "moe_renormalize": config.moe_renormalize,
        "routed_scaling_factor": config.routed_scaling_factor,
        "num_expert_group": config.num_expert_group,
        "topk_group": config.topk_group,
        "use_grouped_topk": raw.get("use_grouped_topk", True),
        "first_k_dense_replace": first,
        "moe_layer_freq": freq,
    }
    if not _says(config, first, freq):
        result["mlp_layer_types"] = [
            "sparse" if kind == MOE else "dense" for kind in config.mlp_layer_types
        ]
        warnings.append(
            "stock mlx-lm cannot express which layers are MoE and will refuse this model"
        )
    if config.gate_lower_bound is not None:
        linear["gate_lower_bound"] = config.gate_lower_bound
        warnings.append("stock mlx-lm ignores gate_lower_bound and will compute another gate")
    return result, warnings


def _dense_rule(config: KimiLinearConfig) -> tuple[int, int]:
    """``first_k_dense_replace`` and ``moe_layer_freq`` for these MoE layers, if any can say it."""
    kinds = config.mlp_layer_types
    if MOE not in kinds:
        return len(kinds), 1
    first = kinds.index(MOE)
    for freq in range(1, len(kinds) + 1):
        if _says(config, first, freq):
            return first, freq
    return first, 1


def _says(config: KimiLinearConfig, first: int, freq: int) -> bool:
    rule = (
        MOE if i >= first and i % freq == 0 else DENSE for i in range(len(config.mlp_layer_types))
    )
    return tuple(rule) == config.mlp_layer_types
