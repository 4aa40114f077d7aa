"""Mixture of experts: routed SwiGLU experts, plus shared ones that see every token."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU

from ..kernels.route import moe_route
from ..kernels.route import supported as route_supported
from ..ops.elementwise import swiglu
from .merged import Bundle, Merged, gather, in_reach
from .mlp import MLP

# mlx-lm's experts sort their tokens from this many choices on.
_SORTED_FROM = 64


class Experts(SwitchGLU):
    """mlx-lm's routed experts with gate and up merged, and 16-bit weights on the CPU.

    MLX's CPU build gathers float32 matrices only: there 16-bit experts are computed in float32.
    """

    def __init__(self, input_dims: int, hidden_dims: int, num_experts: int):
        super().__init__(input_dims, hidden_dims, num_experts, activation=_SwiGLU())
        self._bundle: Bundle | None = None

    def merge(self, on: bool = True) -> None:
        """Merge gate and up, where MLX can sort rows for the product, or apply them one by one."""
        on = on and in_reach(self._inputs())
        self._bundle = Bundle(self._inputs()) if on else None

    def _inputs(self) -> tuple[nn.Module, nn.Module]:
        return self.gate_proj, self.up_proj

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """x [..., D], chosen experts [..., k] -> [..., k, D]."""
        if x.dtype != mx.float32 and mx.default_device() == mx.cpu:
            return self._unsorted(_cpu_linear, x, chosen)
        merged = None if self._bundle is None else self._bundle.whole(self._inputs())
        if chosen.size >= _SORTED_FROM and not self._can_be_sorted(merged, chosen.size):
            return self._unsorted(lambda layer, *args: layer(*args), x, chosen)
        if merged is None:
            return super().__call__(x, chosen)
        return (self._few if chosen.size < _SORTED_FROM else self._many)(merged, x, chosen)

    def _can_be_sorted(self, merged: Merged | None, rows: int) -> bool:
        inputs = [[layer] for layer in self._inputs()] if merged is None else [self._inputs()]
        return all(in_reach(maps, rows) for maps in (*inputs, [self.down_proj]))

    def _unsorted(self, apply: Callable, x: mx.array, chosen: mx.array) -> mx.array:
        """A product for each token and expert, each layer by ``apply(layer, rows, chosen)``."""
        rows = x[..., None, None, :]
        hidden = swiglu(apply(self.gate_proj, rows, chosen), apply(self.up_proj, rows, chosen))
        return apply(self.down_proj, hidden, chosen).squeeze(-2)

    def _few(self, merged: Merged, x: mx.array, chosen: mx.array) -> mx.array:
        """A few tokens: two gathered products, and no launch that only counts rows."""
        tokens = mx.broadcast_to(_rows((*x.shape[:-1], 1)), chosen.shape)
        x = x[..., None, None, :]
        y = gather(merged.layers[0], merged.whole, x, rhs_indices=chosen, lhs_indices=tokens)
        hidden = swiglu(*mx.split(y, merged.ends, axis=-1))
        rows = _rows(chosen.shape)
        down = self.down_proj
        return gather(down, down, hidden, rhs_indices=chosen, lhs_indices=rows).squeeze(-2)

    def _many(self, merged: Merged, x: mx.array, chosen: mx.array) -> mx.array:
        """Many tokens: sorted by expert, so that an expert's weights are read for all its rows."""
        order = mx.argsort(chosen.flatten())
        experts = chosen.flatten()[order]
        rows = x.reshape(-1, 1, x.shape[-1])[order // chosen.shape[-1]]
        # The single layers are strided views, and MLX's product of sorted rows would copy such
        # weights of every expert first.
        sorted_by = {"rhs_indices": experts, "sorted_indices": True}
        y = gather(merged.layers[0], merged.whole, rows, **sorted_by)
        hidden = swiglu(*mx.split(y, merged.ends, axis=-1))
        y = self.down_proj(hidden, experts, sorted_indices=True)
        return y[mx.argsort(order)].reshape(*chosen.shape, -1)


class _SwiGLU(nn.Module):
    """What mlx-lm's experts call between their layers."""

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        return swiglu(gate, x)


@lru_cache(maxsize=256)
def _rows(shape: tuple[int, ...]) -> mx.array:
    """Row numbers 0, 1, ... in ``shape``: MLX would make them again for every gathered product."""
    rows = mx.arange(math.prod(shape), dtype=mx.uint32).reshape(shape)
    mx.eval(rows)
    return rows


def _cpu_linear(layer: nn.Module, x: mx.array, chosen: mx.array) -> mx.array:
    """One expert projection of 16-bit activations on the CPU, computed in float32."""
    if isinstance(layer, QuantizedSwitchLinear):
        return layer(x, chosen)
    weight = layer.weight
    if chosen.size < weight.shape[0]:  # a few tokens: widen only the experts they use
        weight, chosen = weight[chosen.flatten()], mx.arange(chosen.size).reshape(chosen.shape)
    weight = weight.astype(mx.float32).swapaxes(-1, -2)
    return mx.gather_mm(x.astype(mx.float32), weight, rhs_indices=chosen).astype(x.dtype)


class MoE(nn.Module):
    """``sum_i w_i expert_i(x) + shared(x)``; the router works in float32 whatever x is.

    ``e_score_correction_bias`` stays float32: in bfloat16 neighbouring values become equal and
    other experts are chosen.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        top_k: int,
        groups: int = 1,
        kept_groups: int = 1,
        num_shared_experts: int = 0,
        activation: str = "sigmoid",
        renormalize: bool = True,
        scale: float = 1.0,
    ):
        super().__init__()
        self.top_k, self.groups, self.kept_groups = top_k, groups, kept_groups
        self.activation, self.renormalize, self.scale = activation, renormalize, scale
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.switch_mlp = Experts(hidden_size, intermediate_size, num_experts)
        self.e_score_correction_bias = mx.zeros((num_experts,), dtype=mx.float32)
        self.shared_experts = (
            MLP(hidden_size, intermediate_size * num_shared_experts) if num_shared_experts else None
        )
        self.sharding_group: mx.distributed.Group | None = None
        self.runner = "ops"

    def merge(self, on: bool = True) -> None:
        """Merge gate and up of the experts into one product, or apply them one by one."""
        self.switch_mlp.merge(on)
        if self.shared_experts is not None:
            self.shared_experts.merge(on)

    def route(
        self, logits: mx.array, dtype: mx.Dtype, runner: str | None = None
    ) -> tuple[mx.array, mx.array]:
        """Experts chosen and their weights for float32 logits [..., experts].

        By the router's kernel where the runner, this layer's or another, has one for its sizes,
        and no gradient is wanted.
        """
        runner = runner or self.runner
        options: dict[str, Any] = {
            "top_k": self.top_k,
            "groups": self.groups,
            "kept_groups": self.kept_groups,
            "activation": self.activation,
            "renormalize": self.renormalize,
            "scale": self.scale,
        }
        bias = self.e_score_correction_bias
        if self.by_kernel(runner):
            return moe_route(logits, bias, **options, dtype=dtype, runner=runner)
        return route(logits, bias, **options)

    def by_kernel(self, runner: str) -> bool:
        """Whether the router's kernel runs under ``runner``."""
        if runner == "ops" or self.training:
            return False
        return route_supported(self.e_score_correction_bias.size, self.top_k, self.groups)[0]

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x [..., hidden] -> the same shape, added to ``residual`` if there is one."""
        chosen, weights = self.route(self.gate(x.astype(mx.float32)), x.dtype)
        each = self.switch_mlp(x, chosen)
        y = (weights[..., None, :].astype(each.dtype) @ each).squeeze(-2)
        parts = [] if residual is None else [residual]
        if self.shared_experts is not None:
            shared = self.shared_experts(x)
            if self.sharding_group is None:
                parts.append(shared)
            else:
                y = y + shared
        if self.sharding_group is not None:
            y = mx.distributed.all_sum(y, group=self.sharding_group)
        return _sum3(parts[0], parts[1], y) if len(parts) == 2 else sum(parts, y)


@partial(mx.compile, shapeless=True)
def _sum3(residual: mx.array, shared: mx.array, routed: mx.array) -> mx.array:
    """One launch for both sums, of the residual's dtype."""
    return residual + (routed + shared).astype(residual.dtype)


@partial(mx.compile, shapeless=True)
def _sigmoid_scores(logits: mx.array, bias: mx.array) -> tuple[mx.array, mx.array]:
    scores = mx.sigmoid(logits)
    return scores, scores + bias


@partial(mx.compile, shapeless=True)
def _share(weights: mx.array, total: mx.array, scale: float) -> mx.array:
    return weights / (total + 1e-20) * scale


def route(
    logits: mx.array,
    bias: mx.array,
    *,
    top_k: int,
    groups: int = 1,
    kept_groups: int = 1,
    activation: str = "sigmoid",
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[mx.array, mx.array]:
    """Choose by ``score + bias``, weigh by ``score``.

    With groups, only the ``kept_groups`` whose two best biased scores sum highest take part. The
    others are set to -inf: a biased score may be negative, so 0 would not keep them out.

    Args:
        logits: float32 [..., experts].
        bias: float32 [experts]; it moves the choice, never the weight.

    Returns:
        (experts chosen [..., top_k], weights float32 [..., top_k]), in no particular order.
    """
    if activation == "sigmoid":
        scores, choice = _sigmoid_scores(logits, bias)
    elif activation == "softmax":
        scores = mx.softmax(logits, axis=-1, precise=True)
        choice = scores + bias
    else:
        raise ValueError(f"router activation must be 'sigmoid' or 'softmax', got {activation!r}")
    dropped = groups - kept_groups
    if dropped:
        choice = mx.unflatten(choice, -1, (groups, -1))
        best = mx.topk(choice, min(2, choice.shape[-1]), axis=-1).sum(axis=-1, keepdims=True)
        worst = mx.argpartition(best, kth=dropped - 1, axis=-2)[..., :dropped, :]
        choice = mx.put_along_axis(choice, worst, mx.array(-mx.inf), axis=-2)
        choice = mx.flatten(choice, -2, -1)
    chosen = mx.argpartition(-choice, kth=top_k - 1, axis=-1)[..., :top_k]
    chosen = mx.stop_gradient(chosen)
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    if renormalize:
        return chosen, _share(weights, weights.sum(axis=-1, keepdims=True), scale)
    return chosen, weights * scale
