"""Mixture of experts: routed SwiGLU experts, plus shared ones that see every token."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU

from .mlp import MLP
from .router import route


class Experts(SwitchGLU):
    """mlx-lm's routed experts, which also run where MLX has no 16-bit gather (the CPU)."""

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """x [..., D], chosen experts [..., k] -> [..., k, D]."""
        if x.dtype == mx.float32 or mx.default_device() != mx.cpu:
            return super().__call__(x, chosen)
        rows = x[..., None, None, :]
        hidden = swiglu(
            _cpu_linear(self.gate_proj, rows, chosen), _cpu_linear(self.up_proj, rows, chosen)
        )
        return _cpu_linear(self.down_proj, hidden, chosen).squeeze(-2)


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

    ``e_score_correction_bias`` stays float32: in bfloat16 neighbouring values collapse and other
    experts win.
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

    def select(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Experts chosen and their float32 weights for x [..., hidden]."""
        return route(
            self.gate(x.astype(mx.float32)),
            self.e_score_correction_bias,
            top_k=self.top_k,
            groups=self.groups,
            kept_groups=self.kept_groups,
            activation=self.activation,
            renormalize=self.renormalize,
            scale=self.scale,
        )

    def __call__(self, x: mx.array) -> mx.array:
        chosen, weights = self.select(x)
        each = self.switch_mlp(x, chosen)
        y = (weights[..., None, :].astype(each.dtype) @ each).squeeze(-2)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x)
        if self.sharding_group is not None:
            y = mx.distributed.all_sum(y, group=self.sharding_group)
        return y
