"""FLA's pure KDA models: from the tensors of their checkpoints to the names of Kimi Linear.

FLA's names and those on the right are read, in any mix:

    model.embeddings                             ->  model.embed_tokens
    {attn_norm,mlp_norm}.weight                  ->  {input,post_attention}_layernorm.weight
    attn.{q,k,v,b,o}_proj, attn.o_norm           ->  self_attn.the same
    attn.f_proj.{0,1}, attn.g_proj.{0,1}         ->  self_attn.{f_a,f_b,g_a,g_b}_proj
    attn.{q,k,v}_conv1d, attn.A_log, attn.dt_bias  ->  as in weight_transforms
"""

from collections.abc import Mapping

from ..weights.safetensors import Spec
from ..weights.weight_mapping import MappingBuilder, WeightMapping
from .fla_kda import FlaKdaConfig
from .weight_transforms import convolution, decay, float32, tied_head

# Maps whose names differ: ours -> FLA's.
RENAMED = {
    "f_a_proj": "f_proj.0",
    "f_b_proj": "f_proj.1",
    "g_a_proj": "g_proj.0",
    "g_b_proj": "g_proj.1",
}


def map_tensors(config: FlaKdaConfig, tensors: Mapping[str, Spec]) -> WeightMapping:
    """How the tensors of a checkpoint become those of the MLX model.

    Raises CheckpointError naming every tensor that is missing, left over, or of a wrong shape.
    """
    build = MappingBuilder(tensors)
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding, theirs = "model.embed_tokens", "model.embeddings"
    source = theirs if build.has(f"{theirs}.weight") else embedding
    build.weight(embedding, (vocab, hidden), theirs)
    if config.tie_word_embeddings:
        tied_head(build, (vocab, hidden), f"{source}.weight")
    for index in range(config.num_hidden_layers):
        _layer(build, config, f"model.layers.{index}")
    build.tensor("model.norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        build.weight("lm_head", (vocab, hidden))
    return build.finish()


def _layer(build: MappingBuilder, config: FlaKdaConfig, path: str) -> None:
    hidden, inner = config.hidden_size, config.intermediate_size
    build.tensor(f"{path}.input_layernorm.weight", (hidden,), f"{path}.attn_norm.weight")
    _kda(build, config, f"{path}.self_attn", f"{path}.attn")
    build.tensor(f"{path}.post_attention_layernorm.weight", (hidden,), f"{path}.mlp_norm.weight")
    build.weight(f"{path}.mlp.gate_proj", (inner, hidden))
    build.weight(f"{path}.mlp.up_proj", (inner, hidden))
    build.weight(f"{path}.mlp.down_proj", (hidden, inner))


def _kda(build: MappingBuilder, config: FlaKdaConfig, path: str, theirs: str) -> None:
    hidden, keys, values = config.hidden_size, config.linear_key_width, config.linear_value_width
    heads, rank, dim = config.linear_state_shape  # the gates' maps have the rank Dv
    gates = heads * dim
    shapes = {
        "q_proj": (keys, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (values, hidden),
        "f_a_proj": (rank, hidden),
        "f_b_proj": (gates, rank),
        "b_proj": (heads, hidden),
        "g_a_proj": (rank, hidden),
        "g_b_proj": (values, rank),
        "o_proj": (hidden, values),
    }
    for name, shape in shapes.items():
        build.weight(f"{path}.{name}", shape, f"{theirs}.{RENAMED.get(name, name)}")
    build.tensor(f"{path}.g_b_proj.bias", (values,), f"{theirs}.g_proj.1.bias")
    for part, width in (("q", keys), ("k", keys), ("v", values)):
        name, hub = f"{path}.{part}_conv.conv.weight", f"{theirs}.{part}_conv1d.weight"
        convolution(build, name, width, config.linear_conv_kernel_dim, hub)
    decay(build, f"{path}.A_log", heads, f"{theirs}.A_log")
    bias, shapes_of_bias = f"{path}.dt_bias", [(gates,), (heads, dim)]
    float32(build, bias, (gates,), shapes_of_bias, f"{theirs}.dt_bias")
    build.tensor(f"{path}.o_norm.weight", (rank,), f"{theirs}.o_norm.weight")
