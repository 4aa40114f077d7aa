"""What a tensor is, by its name: families for reports, and modules that are quantised apart."""

import re
from collections.abc import Iterable

from ..weights.quantization import Quantization
from ..weights.safetensors import Spec

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
# Modules of a model that the default recipe leaves at 16 bits, or quantises otherwise.
GATE_PATH = re.compile(r"\.self_attn\.(b_proj|f_a_proj|f_b_proj|g_a_proj|g_b_proj)$")
CONVOLUTION = re.compile(r"_conv\.conv$")
ROUTER = re.compile(r"\.mlp\.gate$")
ROUTER_QUANTIZATION = Quantization(8, 64)


def tensor_family(name: str) -> str:
    """The family of a tensor by its name."""
    for family, pattern in TENSOR_FAMILIES.items():
        if re.search(pattern, name):
            return family
    return "other"


def by_family(tensors: Iterable[tuple[str, Spec]]) -> dict[str, dict[str, int]]:
    """Number and bytes of the tensors of each family, in a fixed order."""
    sums = {family: {"tensors": 0, "bytes": 0} for family in (*TENSOR_FAMILIES, "other")}
    for name, spec in tensors:
        entry = sums[tensor_family(name)]
        entry["tensors"] += 1
        entry["bytes"] += spec.nbytes
    return {family: entry for family, entry in sums.items() if entry["tensors"]}
