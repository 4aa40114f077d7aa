"""Run by each process of a group: the tiny model's share of the work, logits saved by the first.

``python sharded_logits.py OUT BITS``, BITS 0 for plain weights.
"""

import sys

import mlx.core as mx
import mlx.nn as nn
from tiny import run, tiny_model, tokens


def model(bits: int):
    tiny = tiny_model(num_shared_experts=2, intermediate_size=128, moe_intermediate_size=64)
    if bits:
        nn.quantize(tiny, 32, bits)
    return tiny


def logits(sharded) -> mx.array:
    return run(sharded, tokens(40), [32, 1, 7])


if __name__ == "__main__":
    out, bits = sys.argv[1], int(sys.argv[2])
    group = mx.distributed.init(strict=True, backend="ring")
    split = model(bits)
    split.shard(group)
    result = logits(split)
    if group.rank() == 0:
        heads = split.layers[0].self_attn.num_heads
        mx.save_safetensors(out, {"logits": result, "heads": mx.array(heads)})
