"""`bench endurance`: whether memory stays flat over long runs, on a small model of many layers.

Decoding: one session, resident memory and live arrays at intervals. Prompts: each length in a
process of its own, whose highest resident memory is compared. The model is random and small, so
that a leak of one array a layer and step shows within minutes.
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..context import Context
from ..errors import UserError
from .memory import peak_resident, resident

LAYERS = 24
WIDTH = 64


def config(layers: int = LAYERS, width: int = WIDTH) -> dict[str, Any]:
    """config.json of a random model: three KDA layers and an MLA layer by turns."""
    full = list(range(4, layers + 1, 4))
    return {
        "model_type": "kimi_linear",
        "vocab_size": 512,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * width,
        "num_attention_heads": 2,
        "head_dim": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "kv_lora_rank": 64,
        "mla_use_nope": True,
        "linear_attn_config": {
            "kda_layers": [i for i in range(1, layers + 1) if i not in full],
            "full_attn_layers": full,
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 0,
        "rms_norm_eps": 1e-5,
        "model_max_length": 2**20,
    }


def model(layers: int = LAYERS) -> Any:
    """The model with random weights in float32."""
    from ..models.hybrid import Model
    from ..models.kimi_linear import ModelArgs

    mx.random.seed(0)
    made = Model(ModelArgs.from_dict(config(layers)))
    mx.eval(made.parameters())
    return made.eval()


def decode(
    steps: int, *, every: int = 1000, policy: str = "window:1024+16", layers: int = LAYERS
) -> Iterator[dict[str, Any]]:
    """A row after every so many decoded tokens: memory, live arrays, speed since the last row."""
    context = Context(model(layers), policy=policy)
    context.prefill([1, 2, 3])
    start = time.perf_counter()
    for done, _ in enumerate(context.decode(steps), 1):
        if done % every == 0:
            seconds = time.perf_counter() - start
            yield {
                "run": "decode",
                "policy": policy,
                "layers": layers,
                "tokens": done,
                "resident_mb": resident() / 1e6,
                "active_mb": mx.get_active_memory() / 1e6,
                "arrays": live_arrays(),
                "cache_mb": context.nbytes / 1e6,
                "tokens_per_second": every / seconds,
            }
            start = time.perf_counter()


def prompts(
    lengths: Sequence[int], *, policy: str = "window:1024+16", layers: int = LAYERS
) -> Iterator[dict[str, Any]]:
    """A row a prompt length, each read by a process of its own."""
    for length in lengths:
        command = [sys.executable, "-m", __name__, str(length), policy, str(layers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise UserError(f"the run over {length:,} tokens ended: {lines[-1]}")
        yield json.loads(done.stdout.splitlines()[-1])


def read(length: int, policy: str, layers: int) -> dict[str, Any]:
    """Read a prompt in this process, and its peak."""
    context = Context(model(layers), policy=policy)
    ids = [(7 * i * i + 3 * i) % 512 for i in range(length)]
    context.prefill(ids[: min(4096, length)])  # warm: every shape has been seen
    warm = peak_resident()
    start = time.perf_counter()
    context.prefill(ids[4096:])
    seconds = time.perf_counter() - start
    return {
        "run": "prompt",
        "policy": policy,
        "layers": layers,
        "tokens": length,
        "warm_peak_mb": warm / 1e6,
        "peak_mb": peak_resident() / 1e6,
        "mlx_peak_mb": mx.get_peak_memory() / 1e6,
        "cache_mb": context.nbytes / 1e6,
        "tokens_per_second": max(length - 4096, 0) / seconds,
    }


def live_arrays() -> int:
    """MLX arrays that Python holds."""
    gc.collect()
    return sum(isinstance(one, mx.array) for one in gc.get_objects())


if __name__ == "__main__":
    print(json.dumps(read(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
