"""Dense SwiGLU feed-forward block."""

import mlx.core as mx
import mlx.nn as nn

from ..ops.elementwise import swiglu
from .merged import Bundle


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, no biases."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self._bundle: Bundle | None = None

    def merge(self, on: bool = True) -> None:
        """Merge gate and up into one product, or apply them one by one."""
        self._bundle = Bundle(self._inputs()) if on else None

    def _inputs(self) -> tuple[nn.Module, nn.Module]:
        return self.gate_proj, self.up_proj

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x [..., hidden] -> the same shape, added to ``residual`` if there is one."""
        maps = self._inputs()
        gate, up = [f(x) for f in maps] if self._bundle is None else self._bundle(maps, x)
        y = self.down_proj(swiglu(gate, up))
        return y if residual is None else residual + y.astype(residual.dtype)
