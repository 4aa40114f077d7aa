"""The model families that can be converted, and the families of tensors that reports add up."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CheckpointError
from ..weights.safetensors import Spec
from ..weights.weight_mapping import WeightMapping
from . import FAMILIES, read_config
from . import fla_kda_weights as fla_kda
from . import kimi_linear_weights as kimi_linear
from .hybrid_config import HybridConfig

# Of hub names and MLX names alike; the first that matches counts.
TENSOR_FAMILIES = {
    "embedding": r"embed_tokens\.|^model\.embeddings\.",
    "head": r"^lm_head\.",
    "norms": r"norm\.weight$",
    "router": r"\.(mlp|block_sparse_moe)\.gate\.|e_score_correction_bias$",
    "shared experts": r"\.shared_experts\.",
    "experts": r"\.experts\.|\.switch_mlp\.",
    "dense MLP": r"\.(mlp|block_sparse_moe)\.",
    "KDA gates": r"\.(A_log|dt_bias)$|\.(b|f_a|f_b|g_a|g_b|f|g)_proj\.",
    "KDA convolutions": r"_conv1d\.|_conv\.conv\.",
    "MLA latents": r"\.(kv_a_proj_with_mqa|kv_b_proj|embed_q|unembed_out)\.",
    "attention projections": r"\.(self_attn|attn)\.[qkvo]_proj\.",
}
# model_type -> its module here, which has `map_tensors`
MAPPINGS = {"kimi_linear": kimi_linear, "kda": fla_kda}


def tensor_family(name: str) -> str:
    """The family of a tensor by its name."""
    for family, pattern in TENSOR_FAMILIES.items():
        if re.search(pattern, name):
            return family
    return "other"


def by_family(tensors: Iterable[tuple[str, Spec]]) -> dict[str, dict[str, int]]:
    """Number, bytes and elements of the tensors of each family, in a fixed order."""
    sums = {family: {"tensors": 0, "bytes": 0} for family in (*TENSOR_FAMILIES, "other")}
    for name, spec in tensors:
        entry = sums[tensor_family(name)]
        entry["tensors"] += 1
        entry["bytes"] += spec.nbytes
    return {family: entry for family, entry in sums.items() if entry["tensors"]}


def map_tensors(config: HybridConfig, tensors: Mapping[str, Spec]) -> WeightMapping:
    """Lay out the mapping of a config's family.

    Raises CheckpointError naming every tensor that is missing, left over, or of a wrong shape.
    """
    return MAPPINGS[config.model_type].map_tensors(config, tensors)


def map_checkpoint(
    raw: dict[str, Any], tensors: Mapping[str, Spec]
) -> tuple[HybridConfig, WeightMapping]:
    """Parse a config and lay out the mapping of its family.

    Raises CheckpointError: what `parse_config` refuses, a tensor that is missing or left over.
    """
    config = parse_config(raw)
    return config, map_tensors(config, tensors)


def parse_config(raw: dict[str, Any]) -> HybridConfig:
    """The config of a family that is converted.

    Raises CheckpointError: an unknown model_type, a feature that is not built, a foreign
    quantisation, a value of a wrong kind.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise CheckpointError(f"model_type {kind!r} is not converted yet; supported: {supported}")
    foreign = raw.get("quantization_config")
    if isinstance(foreign, dict) and "quantization" not in raw:
        method = foreign.get("quant_method", "unknown")
        if method == "compressed-tensors":
            raise CheckpointError(
                "the weights are packed by compressed-tensors; convert them first: "
                "mlx-kda convert SRC OUT"
            )
        raise CheckpointError(
            f"the source is quantised ({method}): convert the unquantised checkpoint instead"
        )
    return read_config(raw)
