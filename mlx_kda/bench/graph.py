"""Launches counted from the lazy graph: what a step asks a GPU to run, without running it."""

import collections
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

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
}


def launches(outputs: Sequence[mx.array]) -> collections.Counter:
    """Primitive -> how often evaluating ``outputs`` launches it.

    Views are not counted; a concatenation counts once an input. Reshapes that have to copy are
    not seen, and on the CPU build MLX spells its fused operations (norms, attention) out as
    several primitives: numbers of two models compare only when counted on the same device.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), *outputs)
        text = path.read_text()
    names = dict(re.findall(r'\{ (\d+) \[label ="([^"]+)", shape=rectangle\]; \}', text))
    arguments = collections.Counter(re.findall(r'"[^"]+" -> (\d+)', text))
    counts: collections.Counter = collections.Counter()
    for node, name in names.items():
        if name not in _VIEWS:
            counts[name] += arguments[node] if name == "Concatenate" else 1
    return counts
