"""Kimi Linear: from the tensors of its checkpoints to those of the MLX model.

The names of the hub (which ``save_pretrained`` also writes) and mlx-lm's own are read, in any mix.
The model's are those of mlx-lm, so that files work with both:

    {q,k,v}_conv1d.weight [C,1,K]            ->  {q,k,v}_conv.conv.weight [C,K,1]
    A_log [H] | [H,1] | [1,1,H,1] | padded   ->  A_log [1,1,H,1] float32
    dt_bias [H*D] | [H,D]                    ->  dt_bias [H*D] float32
    kv_b_proj.weight [H*(nope+v),lora]       ->  embed_q.weight [H,lora,nope] and
                                                 unembed_out.weight [H,v,lora]
    experts.I.{w1,w3,w2}.weight [out,in]     ->  switch_mlp.{gate,up,down}_proj.weight [E,out,in]
    gate.e_score_correction_bias [E]         ->  mlp.e_score_correction_bias [E] float32
"""

import re
from collections.abc import Mapping

import mlx.core as mx

from ..errors import CheckpointError
from ..format import listed
from ..weights.quantization import PARTS, Quantization, dequantize, quantization_of
from ..weights.safetensors import Read, Spec
from ..weights.weight_mapping import MappingBuilder, Step, WeightMapping, stack_step
from .hybrid_config import KDA, MOE
from .kimi_linear import KimiLinearConfig
from .weight_transforms import convolution, decay, float32, tied_head

# Names that only a state dict saved by hand from transformers has: save_pretrained undoes them.
RUNTIME_NAMES = re.compile(r"\.forget_gate\.|\.self_attn\.conv1d\.|\.experts\.gate_up_proj")
UNUSED = {
    re.compile(r"^(model\.)?mtp\."): "multi-token prediction is not used to generate",
    re.compile(r"\.rotary_emb\.inv_freq$"): "derived from the config; these layers do not rotate",
}
EXPERT_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def map_tensors(config: KimiLinearConfig, tensors: Mapping[str, Spec]) -> WeightMapping:
    """How the tensors of a checkpoint become those of the MLX model.

    Raises CheckpointError naming every tensor that is missing, left over, or of a wrong shape.
    """
    if runtime := [name for name in tensors if RUNTIME_NAMES.search(name)]:
        raise CheckpointError(
            f"this is a transformers state dict saved by hand (it holds {listed(runtime[:1])}); "
            "save the model with model.save_pretrained(folder) and convert that folder"
        )
    build = MappingBuilder(tensors)
    for name in tensors:
        for pattern, reason in UNUSED.items():
            if pattern.search(name):
                build.drop(name, reason)

    hidden, vocab = config.hidden_size, config.vocab_size
    build.weight("model.embed_tokens", (vocab, hidden))
    if config.tie_word_embeddings:
        tied_head(build, (vocab, hidden), "model.embed_tokens.weight")
    for index in range(config.num_hidden_layers):
        _layer(build, config, index)
    build.tensor("model.norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        build.weight("lm_head", (vocab, hidden))
    return build.finish()


def _layer(build: MappingBuilder, config: KimiLinearConfig, index: int) -> None:
    path, hidden = f"model.layers.{index}", config.hidden_size
    build.tensor(f"{path}.input_layernorm.weight", (hidden,))
    if config.layer_types[index] == KDA:
        _kda(build, config, f"{path}.self_attn")
    else:
        _mla(build, config, f"{path}.self_attn")
    build.tensor(f"{path}.post_attention_layernorm.weight", (hidden,))
    if config.mlp_layer_types[index] == MOE:
        _moe(build, config, path)
    else:
        _mlp(build, f"{path}.mlp", f"{path}.block_sparse_moe", hidden, config.intermediate_size)


def _kda(build: MappingBuilder, config: KimiLinearConfig, path: str) -> None:
    hidden, heads, width = config.hidden_size, config.linear_num_heads, config.linear_head_dim
    channels = heads * width
    for part in "qkv":
        build.weight(f"{path}.{part}_proj", (channels, hidden))
    for part in "qkv":
        name, hub = f"{path}.{part}_conv.conv.weight", f"{path}.{part}_conv1d.weight"
        convolution(build, name, channels, config.linear_conv_kernel_dim, hub)
    build.weight(f"{path}.f_a_proj", (width, hidden))
    build.weight(f"{path}.f_b_proj", (channels, width))
    build.weight(f"{path}.b_proj", (heads, hidden))
    build.weight(f"{path}.g_a_proj", (width, hidden))
    build.weight(f"{path}.g_b_proj", (channels, width))
    decay(build, f"{path}.A_log", heads)
    float32(build, f"{path}.dt_bias", (channels,), [(channels,), (heads, width)])
    build.tensor(f"{path}.o_norm.weight", (width,))
    build.weight(f"{path}.o_proj", (hidden, channels))


def _mla(build: MappingBuilder, config: KimiLinearConfig, path: str) -> None:
    hidden, heads, lora = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    build.weight(f"{path}.q_proj", (heads * (nope + rope), hidden))
    build.weight(f"{path}.kv_a_proj_with_mqa", (lora + rope, hidden))
    build.tensor(f"{path}.kv_a_layernorm.weight", (lora,))
    if build.has(f"{path}.kv_b_proj.weight"):
        _split_kv_b(build, path, heads, nope, value, lora)
    else:
        build.weight(f"{path}.embed_q", (heads, lora, nope), f"{path}.kv_b_proj")
        build.weight(f"{path}.unembed_out", (heads, value, lora), f"{path}.kv_b_proj")
    build.weight(f"{path}.o_proj", (hidden, heads * value))


def _mlp(build: MappingBuilder, path: str, alias: str, hidden: int, inner: int) -> None:
    build.weight(f"{path}.gate_proj", (inner, hidden), f"{alias}.gate_proj")
    build.weight(f"{path}.up_proj", (inner, hidden), f"{alias}.up_proj")
    build.weight(f"{path}.down_proj", (hidden, inner), f"{alias}.down_proj")


def _moe(build: MappingBuilder, config: KimiLinearConfig, path: str) -> None:
    hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    mlp, hub = f"{path}.mlp", f"{path}.block_sparse_moe"
    build.weight(f"{mlp}.gate", (experts, hidden), f"{hub}.gate")
    name = f"{mlp}.e_score_correction_bias"
    aliases = (f"{hub}.gate.e_score_correction_bias", f"{mlp}.gate.e_score_correction_bias")
    float32(build, name, (experts,), [(experts,)], *aliases)
    for part in EXPERT_PARTS:
        shape = (hidden, inner) if part == "down_proj" else (inner, hidden)
        _experts(build, path, part, experts, shape)
    if config.num_shared_experts:
        inner *= config.num_shared_experts
        _mlp(build, f"{mlp}.shared_experts", f"{hub}.shared_experts", hidden, inner)


def _experts(
    build: MappingBuilder, path: str, part: str, count: int, shape: tuple[int, int]
) -> None:
    """Stack the experts' matrices in numeric order: expert 10 comes after 9, not after 1."""
    target = f"{path}.mlp.switch_mlp.{part}"
    if build.has(f"{target}.weight"):
        return build.weight(target, (count, *shape))
    hub = f"{path}.block_sparse_moe.experts"
    group = f"{path}.mlp.experts" if build.has(f"{path}.mlp.experts.0.w1.weight") else hub
    experts = [f"{group}.{i}.{EXPERT_PARTS[part]}" for i in range(count)]
    if absent := [f"{expert}.weight" for expert in experts if not build.has(f"{expert}.weight")]:
        return build.missing.extend(absent)
    if any(build.has(f"{expert}.scales") for expert in experts):
        return _quantized_experts(build, target, experts, shape)
    specs = [build.floats(f"{expert}.weight", [shape]) for expert in experts]
    return _stack(build, f"{target}.weight", [f"{expert}.weight" for expert in experts], specs)


def _quantized_experts(
    build: MappingBuilder, target: str, experts: list[str], shape: tuple[int, int]
) -> None:
    """Stack experts that are quantised, all in one way."""
    settings = {
        quantization_of(build.left, expert, shape) if build.has(f"{expert}.scales") else None
        for expert in experts
    }
    first = settings.pop()
    if settings or first is None:
        raise CheckpointError(f"the experts of {target} are quantised in different ways")
    build.mapping.quantized[target] = first
    for part in PARTS:
        names = [f"{expert}.{part}" for expert in experts if build.has(f"{expert}.{part}")]
        if names:
            _stack(build, f"{target}.{part}", names, [build.left[name] for name in names])


def _stack(build: MappingBuilder, name: str, sources: list[str], specs: list[Spec]) -> None:
    if len(dtypes := {str(spec.dtype) for spec in specs}) > 1:
        raise CheckpointError(f"the experts of {name} mix dtypes: {listed(sorted(dtypes))}")
    build.add(stack_step(sources, name, specs[0]))


def _split_kv_b(
    build: MappingBuilder, path: str, heads: int, nope: int, value: int, lora: int
) -> None:
    """Split kv_b_proj by head into the map to latents (transposed) and the map to values.

    Checkpoints of late 2025 hold it quantised, affine or mxfp4. It is split dequantised and stays
    so: the parts are small, and a second rounding along another axis would cost accuracy.
    """
    base, shape = f"{path}.kv_b_proj", (heads * (nope + value), lora)
    keys, values = f"{path}.embed_q.weight", f"{path}.unembed_out.weight"
    names: tuple[str, ...] = (f"{base}.weight",)
    settings: Quantization | None = None
    if build.has(f"{base}.scales"):
        settings = quantization_of(build.left, base, shape)
        names = tuple(f"{base}.{part}" for part in PARTS[:3] if build.has(f"{base}.{part}"))
        scales = build.left[f"{base}.scales"].dtype
        dtype = scales if settings.mode == "affine" else mx.bfloat16
    else:
        dtype = build.floats(names[0], [shape]).dtype

    def run(read: Read) -> dict[str, mx.array]:
        arrays = [read(name) for name in names]
        weight = dequantize(arrays, settings, dtype) if settings else arrays[0]
        weight = weight.reshape(heads, nope + value, lora)
        return {keys: weight[:, :nope].swapaxes(-1, -2), values: weight[:, nope:]}

    outputs = {keys: Spec((heads, lora, nope), dtype), values: Spec((heads, value, lora), dtype)}
    build.add(Step(names, outputs, run))
