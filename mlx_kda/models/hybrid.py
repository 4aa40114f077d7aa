"""The model that the families share: KDA and MLA layers, with dense or mixture-of-experts MLPs.

The classes keep mlx-lm's contract (``from_dict``, ``__call__``, ``layers``, ``sanitize``,
``make_cache``, ``cast_predicate``, ``quant_predicate``, ``shard``) and the parameter names of its
Kimi Linear, so that files and tools work with both.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..attention import resolve
from ..cache import LatentCache, Policy, make_cache
from ..layers import MLA, MLP, KimiDeltaAttention, MoE, Padding, RMSNorm
from ..weights.safetensors import Spec
from . import map_tensors
from .hybrid_config import KDA, MOE, HybridConfig
from .sharding import shard
from .tensor_roles import GATE_PATH, ROUTER, ROUTER_QUANTIZATION


class DecoderLayer(nn.Module):
    """``h = x + attention(norm(x));  h + mlp(norm(h))``."""

    def __init__(self, config: HybridConfig, index: int):
        super().__init__()
        self.is_linear = config.layer_types[index] == KDA
        self.self_attn = _kda(config) if self.is_linear else _mla(config)
        is_moe = config.mlp_layer_types[index] == MOE
        self.mlp = _moe(config) if is_moe else MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self,
        x: mx.array,
        mask: mx.array | str | None = None,
        cache: Any = None,
        padding: Padding | None = None,
    ) -> mx.array:
        past = (cache, padding) if self.is_linear else (mask, cache)
        y = self.self_attn(self.input_layernorm(x), *past)
        # The casts do nothing unless some parameter is wider than the activations.
        h = x + y.astype(x.dtype)
        return self.mlp(self.post_attention_layernorm(h), residual=h)


class Decoder(nn.Module):
    """Embedding, decoder layers and final norm: tokens to hidden states."""

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._conv_kernel = config.linear_conv_kernel_dim
        linear = [layer.is_linear for layer in self.layers]
        self._first_kda = linear.index(True) if True in linear else None
        self._first_mla = linear.index(False) if False in linear else None

    @property
    def dtype(self) -> mx.Dtype:
        """Of the activations: the embedding's, or the norm's where no scale of it is a float."""
        for name in ("scales", "weight"):
            array = self.embed_tokens.get(name)
            if array is not None and mx.issubdtype(array.dtype, mx.floating):
                return array.dtype
        return self.norm.weight.dtype

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """inputs [B, T] token ids -> hidden states [B, T, hidden]."""
        h = self.embed_tokens(inputs).astype(self.dtype)
        T = inputs.shape[1]
        if cache is None:
            cache = [None] * len(self.layers)
        padding, mask = None, "causal"
        if self._first_kda is not None:
            padding = Padding.of(cache[self._first_kda], T, self._conv_kernel)
        if self._first_mla is not None and cache[self._first_mla] is not None:
            mask = cache[self._first_mla].make_mask(T, return_array=False, window_size=None)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h = layer(h, mask, layer_cache, padding)
        return self.norm(h)


class Model(nn.Module):
    """A decoder with its output head."""

    def __init__(self, args: HybridConfig):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = Decoder(args)
        self.lm_head = (
            None
            if args.tie_word_embeddings
            else nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        )
        self._runner, self._runner_reason = "ops", "not chosen yet: `load` or set `runner`"

    def __call__(
        self, inputs: mx.array, cache: list[Any] | None = None, last_only: bool = False
    ) -> mx.array:
        """Logits of token ids.

        Args:
            inputs: [B, T] integers; T = 0 changes nothing and gives no rows.
            cache: from ``make_cache``; advanced in place. None: the sequence begins and ends here.
            last_only: compute the last row only; in a prefill the head is the widest matrix.

        Returns:
            [B, T, vocab] (or [B, 1, vocab]). Evaluating it evaluates every array of the cache too,
            so no graph is carried from step to step.
        """
        if inputs.ndim != 2:
            raise ValueError(f"inputs must be [B, T] token ids, got shape {inputs.shape}")
        B, T = inputs.shape
        if T == 0:
            return mx.zeros((B, 0, self.args.vocab_size), dtype=self.model.dtype)
        h = self.model(inputs, cache)
        if last_only:
            h = h[:, -1:]
        logits = self.model.embed_tokens.as_linear(h) if self.lm_head is None else self.lm_head(h)
        if cache is None:
            return logits
        carried = [
            array
            for layer, layer_cache in zip(self.layers, cache, strict=True)
            if layer.is_linear or isinstance(layer_cache, LatentCache)
            for array in (layer_cache.cache if layer.is_linear else layer_cache.state)
        ]
        return mx.depends([logits], carried)[0] if carried else logits

    @property
    def layers(self) -> list[DecoderLayer]:
        return self.model.layers

    @property
    def runner(self) -> str:
        """What computes the KDA layers: "ops", or the runner of their kernels.

        Set to "auto" it becomes "metal" on an Apple GPU and "ops" elsewhere; ``runner_reason``
        says why. "ops", "metal", "emulator", "emulator-fast" and "cuda" are used as given.
        """
        return self._runner

    @runner.setter
    def runner(self, name: str) -> None:
        self.use_runner(*resolve(name))

    @property
    def runner_reason(self) -> str:
        """Why the runner is what it is."""
        return self._runner_reason

    def use_runner(self, name: str, reason: str) -> None:
        """Run the KDA layers by ``name``, and keep the reason."""
        self._runner, self._runner_reason = name, reason
        for layer in self.layers:
            for block in (layer.self_attn, layer.mlp):
                if isinstance(block, (KimiDeltaAttention, MoE)):
                    block.runner = name

    def merge(self, on: bool = True) -> None:
        """Compute linear maps of one input (q, k, v, ...; gate and up) as one, in short steps.

        Weights stay the same arrays and results the same but for the order of sums. Maps that are
        replaced later, by adapters for example, are computed one by one again.
        """
        for layer in self.layers:
            for block in (layer.self_attn, layer.mlp):
                if isinstance(block, (KimiDeltaAttention, MLP, MoE)):
                    block.merge(on)

    @property
    def kda_layers(self) -> list[KimiDeltaAttention]:
        blocks = (layer.self_attn for layer in self.layers)
        return [block for block in blocks if isinstance(block, KimiDeltaAttention)]

    def make_cache(self, policy: str | Policy = "exact", *, portable: bool = True) -> list[Any]:
        """An empty cache; see ``mlx_kda.cache.make_cache``."""
        return make_cache(self, policy, portable=portable)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Weights of any known layout under this class's names and shapes.

        Raises:
            CheckpointError: a tensor is missing, left over, or of a wrong shape.
        """
        specs = {name: Spec(tuple(w.shape), w.dtype) for name, w in weights.items()}
        made: dict[str, mx.array] = {}
        for step in map_tensors(self.args, specs).steps:
            made |= step.run(weights.__getitem__)
        return made

    @property
    def cast_predicate(self) -> Callable[[str], bool]:
        """Whether a parameter is cast by ``--dtype``: not gate parameters and router biases."""
        return lambda path: not path.endswith(("e_score_correction_bias", "A_log", "dt_bias"))

    @property
    def quant_predicate(self) -> Callable[[str, nn.Module], bool | dict]:
        """What mlx-lm's quantiser quantises, and how: this package's default recipe."""

        def rule(path: str, _: nn.Module) -> bool | dict:
            if ROUTER.search(path):
                return ROUTER_QUANTIZATION.as_config()
            return not GATE_PATH.search(path)

        return rule

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        """Split heads, MLP widths and expert widths over the processes of ``group``."""
        shard(self, group or mx.distributed.init())


def _kda(config: HybridConfig) -> KimiDeltaAttention:
    return KimiDeltaAttention(
        config.hidden_size,
        config.linear_num_heads,
        config.linear_head_dim,
        config.linear_conv_kernel_dim,
        config.rms_norm_eps,
        config.gate_lower_bound,
        num_v_heads=config.linear_num_v_heads,
        v_head_dim=config.linear_v_head_dim,
        gate_bias=config.output_gate_bias,
        negative_eigenvalues=config.allow_neg_eigval,
    )


def _mla(config: HybridConfig) -> MLA:
    return MLA(
        config.hidden_size,
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank,
        config.latent_norm_eps,
    )


def _moe(config: HybridConfig) -> MoE:
    return MoE(
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        top_k=config.num_experts_per_token,
        groups=config.num_expert_group,
        kept_groups=config.topk_group,
        num_shared_experts=config.num_shared_experts,
        activation=config.moe_router_activation_func,
        renormalize=config.moe_renormalize,
        scale=config.routed_scaling_factor,
    )
