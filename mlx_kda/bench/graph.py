"""Launches counted from the lazy graph: what a step asks a GPU to run, without running it."""

import collections
import contextlib
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx

# Primitives that only describe memory in another way, on every backend.
_VIEWS = {
    "AsStrided",
    "Broadcast",
    "BroadcastAxes",
    "Copy",
    "Depends",
    "ExpandDims",
    "Flatten",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "StopGradient",
    "Transpose",
    "Unflatten",
    "View",
}


def launches(outputs: Sequence[mx.array]) -> collections.Counter:
    """Primitive -> how often evaluating ``outputs`` launches it.

    Views are not counted; a concatenation counts once an input. Reshapes that have to copy are
    not seen. Count two models under the same `as_on_metal`, or neither.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), *outputs)
        text = path.read_text()
    # A node's lines: its declaration, then an edge from each argument. Calls of one compiled
    # function share a number but not a declaration.
    counts: collections.Counter = collections.Counter()
    concatenate = None
    for declared, name, argument in re.findall(
        r'\{ (\d+) \[label ="([^"]+)", shape=rectangle\]; \}|"[^"]+" -> (\d+)', text
    ):
        if argument:
            counts["Concatenate"] += argument == concatenate
            continue
        concatenate = declared if name == "Concatenate" else None
        if name != "Concatenate" and name.split()[0] not in _VIEWS:
            counts[name] += 1
    return +counts


def state_arrays(cache: Sequence[Any]) -> list[mx.array]:
    """The arrays that a model's cache holds: what a step has to compute beside its token."""
    return [a for entry in cache for a in entry.state if isinstance(a, mx.array)]


@contextlib.contextmanager
def as_on_metal() -> Iterator[None]:
    """Build graphs as MLX does with Metal, on a machine without: to be counted, not evaluated.

    MLX's CPU build spells norms, softmax, attention and unpacking out as several primitives, and
    mlx-lm takes its recurrence's loop. Here each is one node, as it is one kernel on an Apple GPU.
    """
    from mlx_lm.models import gated_delta

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
    """Outputs that come out of one launch (an "Arange") and hang on all the inputs."""
    kinds = list(zip(shapes, dtypes, strict=True))
    sizes = [math.prod(shape) * dtype.size // 4 + 1 for shape, dtype in kinds]
    ends = list(itertools.accumulate(sizes))
    words = mx.depends([mx.arange(ends[-1], dtype=mx.int32)], inputs)[0]
    outputs = []
    for (shape, dtype), size, end in zip(kinds, sizes, ends, strict=True):
        flat = words[end - size : end].view(dtype)[: math.prod(shape)]
        outputs.append(flat.reshape(shape))
    return outputs
