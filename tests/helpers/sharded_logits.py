"""Run by each process of a group: the tiny model's share of the work, logits saved by the first.

``python sharded_logits.py OUT KIND``: KIND is the bits of the weights, 0 for plain ones, or "fla"
for a pure KDA model with more value heads than key heads and a bias on the output gate.
"""

import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from tiny import run, tiny_model, tokens

from mlx_kda.models import load_model

FLA = Path(__file__).parent.parent / "goldens-fla" / "more-value-heads"


def model(kind: str):
    if kind == "fla":
        fla = load_model(FLA)
        fla.merge(False)
        fla.update(tree_map(lambda p: p.astype(mx.float32), fla.parameters()))
        return fla
    bits = int(kind)
    tiny = tiny_model(num_shared_experts=2, intermediate_size=128, moe_intermediate_size=64)
    if bits:
        nn.quantize(tiny, 32, bits)
    return tiny


def logits(sharded) -> mx.array:
    return run(sharded, tokens(40) % sharded.args.vocab_size, [32, 1, 7])


if __name__ == "__main__":
    out, kind = sys.argv[1:]
    group = mx.distributed.init(strict=True, backend="ring")
    split = model(kind)
    split.shard(group)
    result = logits(split)
    if group.rank() == 0:
        heads = split.layers[0].self_attn.num_heads
        mx.save_safetensors(out, {"logits": result, "heads": mx.array(heads)})
