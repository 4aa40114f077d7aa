"""Kernels that one decode step of Kimi Linear 48B launches on a GPU, ours and mlx-lm's, counted.

    python benchmarks/launches.py
    python benchmarks/launches.py --q-bits 0

Counted from the lazy graph of a model with the 48B's layers and small matrices, which has the same
number of launches. Nothing is run.
"""

import argparse
import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from common import add_output, run
from mlx_lm.models import gated_delta
from mlx_lm.models import kimi_linear as mlx_lm_kimi

from mlx_kda.bench.model import launches, state_arrays
from mlx_kda.bench.results import Benchmark, columns
from mlx_kda.bench.shapes import config
from mlx_kda.bench.subject import as_loaded, pack
from mlx_kda.cli.measure import measure
from mlx_kda.models.hybrid import Model
from mlx_kda.models.kimi_linear import ModelArgs

BENCHMARK = Benchmark(
    "launches",
    "Kernels that a decode step of Kimi Linear 48B asks of a GPU, counted",
    columns("candidate q_bits launches", q_bits="bits"),
    "Counted from the graph as it is built with Metal, for the 48B's layers; nothing ran.",
)
# Layers, chosen experts, convolution kernel and groups of the 48B; the smallest sizes that
# quantise.
CONFIG = config(
    "48b",
    **{
        "vocab_size": 128,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "head_dim": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "kv_lora_rank": 64,
        "num_experts": 16,
        "moe_intermediate_size": 64,
        "linear_attn_config": {"num_heads": 8, "head_dim": 64},
    },
)


def rows(q_bits: int | None = 4) -> Iterator[dict[str, Any]]:
    """Yield one row for each candidate: launches of one greedy decode step, in all and by kind."""
    with as_on_metal():
        for name, model in (
            ("ours", _ours()),
            ("ours, maps one by one", _ours()),
            ("ours, operations", _ours()),
            ("mlx-lm", mlx_lm_kimi.Model(mlx_lm_kimi.ModelArgs.from_dict(CONFIG)).eval()),
        ):
            pack(model, mx.bfloat16, q_bits)
            if name != "mlx-lm":
                as_loaded(model)
                model.merge("one by one" not in name)
                if "operations" not in name:
                    model.use_runner("metal", "to be counted")
            mx.eval(model.parameters())
            yield {"candidate": name, "q_bits": q_bits, **_count(model)}


def _ours() -> nn.Module:
    return Model(ModelArgs.from_dict(CONFIG)).eval()


def _count(model: nn.Module) -> dict[str, Any]:
    cache = model.make_cache()
    _begin(model, cache)
    logits = model(mx.array([[1]]), cache=cache)
    token = mx.argmax(logits[:, -1], axis=-1)
    counts = launches([token, *state_arrays(cache)])
    return {"launches": counts.total(), "of": dict(counts.most_common())}


def _begin(model: nn.Module, cache: list[Any]) -> None:
    """A cache as after some tokens, without running any."""
    linear = CONFIG["linear_attn_config"]
    H, D = linear["num_heads"], linear["head_dim"]
    for layer, c in zip(model.layers, cache, strict=True):
        if layer.is_linear:
            for i in range(3):
                c[i] = mx.zeros((1, 3, H * D), dtype=mx.bfloat16)
            c[3] = mx.zeros((1, H, D, D))
            mx.eval([c[i] for i in range(4)])
        else:
            kv_latent = mx.zeros((1, 1, 5, CONFIG["kv_lora_rank"]), dtype=mx.bfloat16)
            k_pe = mx.zeros((1, 1, 5, CONFIG["qk_rope_head_dim"]), dtype=mx.bfloat16)
            c.update_and_fetch(kv_latent, k_pe)
            mx.eval(c.state)


@contextlib.contextmanager
def as_on_metal() -> Iterator[None]:
    """Build graphs as MLX does with Metal, without Metal: to be counted, not evaluated.

    MLX's CPU build splits norms, softmax, attention and unpacking into several primitives, and
    mlx-lm loops over the recurrence. Here each is one node, as it is one kernel on an Apple GPU.
    """

    def like(*shapes_of: int) -> Callable:
        """One node whose outputs have the shapes of some of its arguments."""

        def call(*args, **_):
            arrays = [a for a in args if isinstance(a, mx.array)]
            outputs = [arrays[i] for i in shapes_of]
            results = _node(arrays, [o.shape for o in outputs], [o.dtype for o in outputs])
            return results[0] if len(results) == 1 else tuple(results)

        return call

    def attention(q, k, v, **_):
        shape = (*q.shape[:-1], v.shape[-1])
        return _node([q, k, v], [shape], [q.dtype])[0]

    def logsumexp(a, axis=-1, keepdims=False, **_):
        shape = a.shape[:-1] + ((1,) if keepdims else ())
        return _node([a], [shape], [a.dtype])[0]

    def dequantize(w, scales, biases=None, group_size=64, bits=4, **_):
        shape = (*w.shape[:-1], w.shape[-1] * 32 // bits)
        arrays = [w, scales] + ([] if biases is None else [biases])
        return _node(arrays, [shape], [scales.dtype if biases is not None else mx.bfloat16])[0]

    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (
            (mx.fast, "rms_norm", like(0)),
            (mx.fast, "scaled_dot_product_attention", attention),
            (mx, "softmax", like(0)),
            (mx, "logsumexp", logsumexp),
            (mx, "dequantize", dequantize),
            (gated_delta, "gated_delta_kernel", like(2, 5)),
            (mx.fast, "metal_kernel", _kernel),
            (mx.metal, "is_available", lambda: True),
            (mx, "default_device", lambda: mx.Device(mx.gpu, 0)),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def _kernel(**_) -> Callable[..., list[mx.array]]:
    """Stands for `mx.fast.metal_kernel`, which MLX without Metal does not put into a graph."""

    def call(*, inputs, output_shapes, output_dtypes, **_):
        arrays = [x for x in inputs if isinstance(x, mx.array)]
        return _node(arrays, output_shapes, output_dtypes)

    return call


def _node(inputs: list[mx.array], shapes: Sequence, dtypes: Sequence) -> list[mx.array]:
    """Outputs of one launch (an "Arange") that depend on all the inputs."""
    kinds = list(zip(shapes, dtypes, strict=True))
    sizes = [math.prod(shape) * dtype.size // 4 + 1 for shape, dtype in kinds]
    ends = list(itertools.accumulate(sizes))
    words = mx.depends([mx.arange(ends[-1], dtype=mx.int32)], inputs)[0]
    outputs = []
    for (shape, dtype), size, end in zip(kinds, sizes, ends, strict=True):
        flat = words[end - size : end].view(dtype)[: math.prod(shape)]
        outputs.append(flat.reshape(shape))
    return outputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--q-bits",
        type=int,
        choices=(0, 4, 8),
        default=4,
        metavar="N",
        help="bits of the weights, 0 for bfloat16 (default: 4)",
    )
    add_output(parser)


def main(args: argparse.Namespace) -> int:
    return measure(BENCHMARK, rows(args.q_bits or None), args)


if __name__ == "__main__":
    sys.exit(run(__doc__, add_arguments, main))
