"""Linear layers with the same input merged into one matrix product: fewer launches per decode step.

A merged layer owns the weights, and the layers it was made of become views of them, so no weight is
stored twice and parameter names stay. Each step checks that the layers are still the same: once an
adapter or new weights have replaced one, the layers are applied one by one again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from . import blas_layout

# Arrays of a layer with one row (or one row per expert) for each output.
_ROWS = ("weight", "scales", "biases")
# Up to this many tokens a step is bound by launches; with more, strided outputs cost more.
FEW = 8


class Merged:
    """Several linear layers, or expert layers, of one input and one quantisation as one layer."""

    def __init__(self, layers: Sequence[nn.Module], axis: int):
        self.axis = axis
        self.layers = list(layers)
        self.sizes = [layer.weight.shape[axis] for layer in layers]
        self.ends = [sum(self.sizes[: i + 1]) for i in range(len(layers) - 1)]
        self.whole = {}
        for name in _ROWS:
            if name in layers[0]:
                parts = [layer[name] for layer in layers]
                if name == "weight" and blas_layout.gains(layers[0]):
                    whole = blas_layout.stacked(parts)
                else:
                    whole = mx.concatenate(parts, axis=axis)
                views = mx.split(whole, self.ends, axis=axis)
                mx.eval(whole, views)
                self.whole[name] = whole
                for layer, view in zip(layers, views, strict=True):
                    layer[name] = view
        self.ids = list(map(id, layers))
        self.views = [(layer, name, w) for layer in layers for name, w in _arrays(layer).items()]

    def __call__(self, x: mx.array) -> list[mx.array]:
        """The outputs of the layers, in order, as views of one array."""
        first = self.layers[0]
        if "scales" in first:
            y = mx.quantized_matmul(
                x,
                self.whole["weight"],
                scales=self.whole["scales"],
                biases=self.whole.get("biases"),
                transpose=True,
                group_size=first.group_size,
                bits=first.bits,
                mode=first.mode,
            )
        else:
            y = x @ self.whole["weight"].T
        return list(mx.split(y, self.ends, axis=-1))


def in_reach(layers: Sequence[nn.Module], rows: int = 0) -> bool:
    """Whether MLX's product of ``rows`` sorted rows finds every expert of ``layers``, merged.

    MLX's CUDA build (0.32.4) counts the bytes before an expert's weights in 31 bits and those
    before its rows in 32: past 2 and 4 GiB it silently reads elsewhere. Quantised weights go
    through another kernel there.
    """
    if not _on_cuda():
        return True
    stacks = [_weight(layer) for layer in layers]
    floats = [w for w in stacks if mx.issubdtype(w.dtype, mx.floating)]
    if not floats:
        return True
    before = sum(w.nbytes // w.shape[0] * (w.shape[0] - 1) for w in floats)
    widest = max(sum(w.shape[1] for w in floats), floats[0].shape[2]) * floats[0].itemsize
    return before < 2**31 and rows * widest < 2**32


def _weight(layer: nn.Module) -> mx.array:
    """The weight of a layer, or of the one that an adapter wraps, [E, out, in]."""
    return layer.weight if "weight" in layer else _weight(layer.linear)


def _on_cuda() -> bool:
    return mx.cuda.is_available() and mx.default_device() != mx.cpu


def gather(
    layer: nn.Module, arrays: Mapping[str, mx.array], x: mx.array, **indices: Any
) -> mx.array:
    """MLX's gathered product of x [..., 1, D] and the ``arrays`` of experts like ``layer``."""
    if "scales" not in layer:
        return mx.gather_mm(x, arrays["weight"].swapaxes(-1, -2), **indices)
    return mx.gather_qmm(
        x,
        arrays["weight"],
        arrays["scales"],
        arrays.get("biases"),
        **indices,
        transpose=True,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )


class Bundle:
    """Linear layers of one input: applied merged to a few tokens, one by one otherwise."""

    def __init__(self, layers: Sequence[nn.Module]):
        self.groups = merge(layers)
        self.ids = {i for group in self.groups for i in group.ids}
        # What each step compares, in one flat list: it runs many times per token.
        self.views = [view for group in self.groups for view in group.views]

    def whole(self, layers: Sequence[nn.Module]) -> Merged | None:
        """The merged layer, if it is one, made of all ``layers`` and still valid.

        One that is no longer valid is given up: views of it are slow by themselves.
        """
        if not self.holds(layers) or len(self.groups) != 1:
            return None
        return self.groups[0] if len(self.groups[0].layers) == len(layers) else None

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Whether the merged layers are among ``layers``, unchanged; if not, give them up."""
        if self.ids.issubset(map(id, layers)):
            for layer, name, view in self.views:
                if layer[name] is not view:
                    break
            else:
                return True
        for layer, name, view in self.views:
            if layer[name] is view:  # an array of its own
                own = blas_layout.laid_out if blas_layout.gains(layer) else mx.contiguous
                layer[name] = own(view)
        self.groups, self.ids, self.views = [], set(), []
        return False

    def __call__(self, layers: Sequence[nn.Module], x: mx.array) -> list[mx.array]:
        """The outputs of ``layers``, the layers as they are now, in order."""
        if not self.holds(layers) or x.size // x.shape[-1] > FEW:
            return [layer(x) for layer in layers]
        made: dict[int, mx.array] = {}
        for group in self.groups:
            made.update(zip(group.ids, group(x), strict=True))
        return [made[id(layer)] if id(layer) in made else layer(x) for layer in layers]


def merge(layers: Sequence[nn.Module]) -> list[Merged]:
    """Merge layers of one kind, width, dtype and quantisation, two or more at a time.

    Layers with a bias, adapters and unknown kinds are left alone.
    """
    kinds: dict[tuple, list[nn.Module]] = {}
    for layer in layers:
        kind = _kind(layer)
        if kind is not None:
            kinds.setdefault(kind, []).append(layer)
    made = []
    for kind, same in kinds.items():
        if len(same) > 1:
            experts = issubclass(kind[0], (SwitchLinear, QuantizedSwitchLinear))
            made.append(Merged(same, axis=1 if experts else 0))
    return made


def _arrays(layer: nn.Module) -> dict[str, mx.array]:
    return {name: layer[name] for name in _ROWS if name in layer}


def _kind(layer: nn.Module) -> tuple | None:
    if type(layer) not in (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear):
        return None
    if "bias" in layer or "global_scale" in layer:
        return None
    packing = tuple(getattr(layer, name, None) for name in ("bits", "group_size", "mode"))
    # Rows of the same length and dtype; for experts, the same number of them.
    rows = tuple((name, w.dtype, w.shape[-1]) for name, w in _arrays(layer).items())
    return (type(layer), *packing, rows, layer.weight.shape[:-2])
