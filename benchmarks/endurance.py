"""Whether memory stays flat over long runs, on a small random model of 24 layers.

    python benchmarks/endurance.py --steps 30000 --prompts 20000,100000

Decoding: one session, with resident memory and live arrays at intervals. Prompts: each length in a
process of its own, whose highest resident memory is compared. The model is so small that a leak of
one array per layer and step shows within minutes.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from common import add_output, count, numbers, run
from memory import live_arrays, peak_resident, resident

from mlx_kda.bench.results import Benchmark, columns
from mlx_kda.bench.shapes import config
from mlx_kda.cli import options
from mlx_kda.cli.measure import measure
from mlx_kda.context import Context
from mlx_kda.errors import UserError
from mlx_kda.models.hybrid import Model
from mlx_kda.models.kimi_linear import ModelArgs

LAYERS = 24
BENCHMARK = Benchmark(
    "endurance",
    "Memory over long runs of a small random model of 24 layers",
    columns(
        "run policy tokens resident_mb arrays peak_mb cache_mb tokens_per_second",
        resident_mb="resident MB",
        arrays="live arrays",
        peak_mb="peak MB",
        cache_mb="cache MB",
        tokens_per_second="tokens/s",
    ),
)
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "kv_lora_rank": 64,
    "linear_attn_config": {"num_heads": 2, "head_dim": 32},
    "num_experts": 0,
}


def model(layers: int = LAYERS) -> Any:
    """The model with random weights in float32."""
    mx.random.seed(0)
    made = Model(ModelArgs.from_dict(config("48b", layers, **SMALL)))
    mx.eval(made.parameters())
    return made.eval()


def decode(
    steps: int, *, every: int = 1000, policy: str = "window:1024+16", layers: int = LAYERS
) -> Iterator[dict[str, Any]]:
    """Yield a row every so many decoded tokens: memory, live arrays, speed since the last row."""
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
    """Yield a row for each prompt length, read by a process of its own."""
    for length in lengths:
        command = [sys.executable, __file__, "--read", str(length), policy, str(layers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise UserError(f"the run over {length:,} tokens ended: {lines[-1]}")
        yield json.loads(done.stdout.splitlines()[-1])


def read(length: int, policy: str, layers: int) -> dict[str, Any]:
    """Read a prompt in this process; its row."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count(parser, "--steps", 30_000, "tokens to decode", low=0)
    numbers(parser, "--prompts", [20_000, 100_000], "tokens of each prompt")
    parser.add_argument(
        "--policy",
        type=options.policy,
        default="window:1024+16",
        metavar="P",
        help="a cache policy (default: window:1024+16)",
    )
    add_output(parser)


def main(args: argparse.Namespace) -> int:
    policy = str(args.policy)
    found = itertools.chain(decode(args.steps, policy=policy), prompts(args.prompts, policy=policy))
    return measure(BENCHMARK, found, args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:  # one prompt, in a process that `prompts` started
        print(json.dumps(read(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
    else:
        sys.exit(run(__doc__, add_arguments, main))
