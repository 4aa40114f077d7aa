"""The KDA layer: projections, short convolutions, gates, the recurrence, gated norm."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels.arguments import LayerParameters, LayerState, Projections
from ..ops.gates import Gate
from .conv import ShortConv
from .merged import Bundle
from .mix import LayerCall, choose
from .norm import RMSNorm
from .padding import Padding


class KimiDeltaAttention(nn.Module):
    """One KDA layer: H heads of Dk channels for queries and keys, Hv of Dv for values.

    ::

        q, k, v = silu(conv(proj(x)));  q, k unit length per head
        g = gate(f_b(f_a(x)), A_log, dt_bias);  beta = sigmoid(b(x))
        o = kda(q, k, v, g, beta)
        y = o_proj(rmsnorm(o) * sigmoid(g_b(g_a(x))))

    The names of the parameters are mlx-lm's.

    ``runner`` says what computes all that lies between the projections: "ops" (MLX operations,
    differentiable), or the kernels under one of their runners. In training it is the operations in
    any case; `choose` tells what takes a call, and why.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        conv_kernel: int,
        norm_eps: float,
        lower_bound: float | None = None,
        *,
        num_v_heads: int | None = None,
        v_head_dim: int | None = None,
        gate_bias: bool = False,
        negative_eigenvalues: bool = False,
    ):
        """A layer with random weights.

        Args:
            hidden_size: width of x.
            num_heads, head_dim: H and Dk.
            conv_kernel: length of the convolutions.
            norm_eps: of the output norm.
            lower_bound: None takes the softplus gate, a negative number the bounded one.
            num_v_heads: Hv, a multiple of H; H unless given. Heads of v share a head of q and k.
            v_head_dim: Dv; Dk unless given.
            gate_bias: whether the output gate's ``g_b_proj`` has a bias.
            negative_eigenvalues: ``beta = 2 sigmoid(b(x))``, in (0, 2).
        """
        super().__init__()
        self.num_heads, self.head_dim, self.conv_kernel = num_heads, head_dim, conv_kernel
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        if self.num_v_heads % num_heads:
            raise ValueError(
                f"{self.num_v_heads} value heads are not a multiple of {num_heads} heads"
            )
        self.lower_bound, self.negative_eigenvalues = lower_bound, negative_eigenvalues
        self.runner = "ops"
        keys, values = num_heads * head_dim, self.num_v_heads * self.v_head_dim
        gates = self.num_v_heads * head_dim
        for name, width in (("q", keys), ("k", keys), ("v", values)):
            self[f"{name}_proj"] = nn.Linear(hidden_size, width, bias=False)
            self[f"{name}_conv"] = ShortConv(width, conv_kernel)
        # The low rank of both gates is the width of a value head.
        self.f_a_proj = nn.Linear(hidden_size, self.v_head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.v_head_dim, gates, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.g_a_proj = nn.Linear(hidden_size, self.v_head_dim, bias=False)
        self.g_b_proj = nn.Linear(self.v_head_dim, values, bias=gate_bias)
        self.A_log = mx.log(mx.random.uniform(1.0, 16.0, (1, 1, self.num_v_heads, 1)))
        self.dt_bias = mx.zeros((gates,), dtype=mx.float32)
        self.o_norm = RMSNorm(self.v_head_dim, eps=norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self._bundle: Bundle | None = None

    def __call__(self, x: mx.array, cache: Any = None, padding: Padding | None = None) -> mx.array:
        """x [B, T, hidden] -> the same shape; ``cache`` holds the four arrays of a LayerState.

        With ``cache.one_by_one`` the tokens are computed as T steps of decoding would.
        """
        if padding is not None and padding.real is not None:
            x = mx.where(padding.real, x, 0)
        B, T = x.shape[:2]
        p, w = self.project(x), self.kernel_parameters()
        if cache is None or cache[3] is None:
            state = w.empty_state(B, x.dtype)
        else:
            state = LayerState(*(cache[i] for i in range(4)))
        steps = [p]
        if T > 1 and getattr(cache, "one_by_one", False):
            steps = [p.cut(t, t + 1) for t in range(T)]
        call = self.choose(T // len(steps), x.dtype)
        outputs = []
        for step in steps:
            y, state = call(step, w, state, padding)
            outputs.append(y)
        y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
        if cache is not None:
            for i, array in enumerate(state):
                cache[i] = array
            cache.advance(T)
        return self.o_proj(y.reshape(p.v.shape))

    def choose(self, T: int, dtype: mx.Dtype, runner: str | None = None) -> LayerCall:
        """What takes T tokens between the projections, under this runner or another."""
        sizes = (self.head_dim, self.v_head_dim, self.conv_kernel)
        return choose(T, *sizes, dtype, runner or self.runner, self.training)

    def merge(self, on: bool = True) -> None:
        """Merge the projections of x into as few products as possible, or apply them one by one."""
        self._bundle = Bundle(self._inputs()) if on else None

    def _inputs(self) -> tuple[nn.Module, ...]:
        return (
            *(self.q_proj, self.k_proj, self.v_proj),
            *(self.f_a_proj, self.g_a_proj, self.b_proj),
        )

    def project(self, x: mx.array) -> Projections:
        """All that the layer computes from x [B, T, hidden] alone."""
        heads = (*x.shape[:2], self.num_v_heads)
        maps = self._inputs()
        made = [f(x) for f in maps] if self._bundle is None else self._bundle(maps, x)
        q, k, v, f, g, b = made
        # The casts do nothing unless a weight is wider than x: windows keep the dtype of x.
        q, k, v = (y.astype(x.dtype) for y in (q, k, v))
        a = self.f_b_proj(f).reshape(*heads, self.head_dim)
        z = self.g_b_proj(g).reshape(*heads, self.v_head_dim)
        return Projections(q, k, v, a, b, z)

    def kernel_parameters(self) -> LayerParameters:
        """What `choose`'s calls need of this layer: sizes, and weights between the projections."""
        return LayerParameters(
            H=self.num_heads,
            Hv=self.num_v_heads,
            Dk=self.head_dim,
            Dv=self.v_head_dim,
            conv_weight=(self.q_conv.conv.weight, self.k_conv.conv.weight, self.v_conv.conv.weight),
            gate=Gate(self.A_log, self.dt_bias, self.lower_bound),
            norm_weight=self.o_norm.weight,
            eps=self.o_norm.eps,
            beta_kind="twice" if self.negative_eigenvalues else "sigmoid",
        )
