"""What a model's memory of a text takes while it runs, from its config alone."""

from collections.abc import Iterable

import mlx.core as mx

from mlx_kda.models.config import KDA, MLA, KimiLinearConfig

STATE_BYTES = 4  # a KDA state is float32 whatever the weights are
FLOATS = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


def state_bytes(config: KimiLinearConfig, dtype: mx.Dtype) -> int:
    """Bytes of all KDA states [H, D, D] in float32 and windows [K - 1, 3 H D] in ``dtype``.

    They do not depend on the length of the text.
    """
    width = config.linear_num_heads * config.linear_head_dim
    state = width * config.linear_head_dim * STATE_BYTES
    window = 3 * width * (config.linear_conv_kernel_dim - 1) * dtype.size
    return config.layer_types.count(KDA) * (state + window)


def latent_bytes(config: KimiLinearConfig, dtype: mx.Dtype) -> int:
    """Bytes of all MLA latents for one token, kept exactly in ``dtype``."""
    numbers = config.kv_lora_rank + config.qk_rope_head_dim
    return config.layer_types.count(MLA) * numbers * dtype.size


def activation_dtype(dtypes: Iterable[str]) -> str:
    """What a model computes in, from its weights' dtypes, the most bytes first.

    Packed words are no dtype to compute in, and in a quantised model the rest decides.
    """
    return next((name for name in dtypes if name in FLOATS), "float32")
