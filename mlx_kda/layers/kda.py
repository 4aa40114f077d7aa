"""The KDA layer: projections, short convolutions, gates, the recurrence, gated norm."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels import layer as kernels
from ..kernels.arguments import Gate
from . import mix as ops
from .conv import ShortConv
from .merged import Bundle, apply
from .mix import Memory, Projections
from .norm import RMSNorm
from .padding import Padding


class KimiDeltaAttention(nn.Module):
    """One KDA layer: H heads of Dk channels for queries and keys, Hv of Dv for values.

    ::

        q, k, v = silu(conv(proj(x)));  q, k unit length a head
        g = gate(f_b(f_a(x)), A_log, dt_bias);  beta = sigmoid(b(x))
        o = kda(q, k, v, g, beta)
        y = o_proj(rmsnorm(o) * sigmoid(g_b(g_a(x))))

    The names of the parameters are mlx-lm's.

    ``mix`` is all that lies between the projections in and out. ``runner`` says what computes it:
    "ops" (MLX operations, differentiable), or the kernels under one of their runners. In training
    it is the operations in any case.
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
            gate_bias: whether the output gate's map ``g_b_proj`` has a bias.
            negative_eigenvalues: ``beta = 2 sigmoid(b(x))``, in (0, 2).
        """
        super().__init__()
        self.num_heads, self.head_dim, self.conv_kernel = num_heads, head_dim, conv_kernel
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        if self.num_v_heads % num_heads:
            raise ValueError(f"{self.num_v_heads} value heads are no multiple of {num_heads} heads")
        self.lower_bound, self.negative_eigenvalues = lower_bound, negative_eigenvalues
        self.runner = "ops"
        keys, values = num_heads * head_dim, self.num_v_heads * self.v_head_dim
        gates = self.num_v_heads * head_dim
        for name, width in (("q", keys), ("k", keys), ("v", values)):
            self[f"{name}_proj"] = nn.Linear(hidden_size, width, bias=False)
            self[f"{name}_conv"] = ShortConv(width, conv_kernel)
        # Both gates pass through as many channels as a value head has.
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
        """x [B, T, hidden] -> the same shape; ``cache`` holds the four arrays of Memory."""
        if padding is not None and padding.real is not None:
            x = mx.where(padding.real, x, 0)
        memory = Memory() if cache is None else Memory(*(cache[i] for i in range(4)))
        one_by_one = getattr(cache, "one_by_one", False)
        mix = self._mix_one_by_one if one_by_one else self.mix
        y, memory = mix(self.project(x), memory, padding)
        if cache is not None:
            for i, array in enumerate(memory):
                cache[i] = array
            cache.advance(x.shape[1])
        return self.o_proj(y)

    def merge(self, on: bool = True) -> None:
        """Apply the maps of x as few products, or one by one."""
        self._bundle = Bundle(self._inputs()) if on else None

    def _inputs(self) -> tuple[nn.Module, ...]:
        return (
            *(self.q_proj, self.k_proj, self.v_proj),
            *(self.f_a_proj, self.g_a_proj, self.b_proj),
        )

    def project(self, x: mx.array) -> Projections:
        heads = (*x.shape[:2], self.num_v_heads)
        q, k, v, f, g, b = apply(self._bundle, self._inputs(), x)
        # The casts do nothing unless a weight is wider than x: windows keep the dtype of x.
        q, k, v = (y.astype(x.dtype) for y in (q, k, v))
        a = self.f_b_proj(f).reshape(*heads, self.head_dim)
        z = self.g_b_proj(g).reshape(*heads, self.v_head_dim)
        return Projections(q, k, v, a, b, z)

    def _mix_one_by_one(
        self, p: Projections, memory: Memory, padding: Padding | None
    ) -> tuple[mx.array, Memory]:
        """``mix`` as T steps of decoding: bit for bit what they compute."""
        out = []
        for t in range(p.q.shape[1]):
            y, memory = self.mix(Projections(*(a[:, t : t + 1] for a in p)), memory, padding)
            out.append(y)
        return mx.concatenate(out, axis=1), memory

    def mix(
        self, p: Projections, memory: Memory, padding: Padding | None = None
    ) -> tuple[mx.array, Memory]:
        """Projections and memory -> (y [B, T, Hv * Dv] for o_proj, the next memory)."""
        if self.choose(p.q.shape[1], p.q.dtype).kernel is None:
            return self.mix_ops(p, memory, padding)
        return self.mix_kernels(p, memory, padding)

    def choose(self, T: int, dtype: mx.Dtype) -> kernels.Choice:
        """The kernel that takes T tokens, or none and why."""
        if self.runner == "ops":
            return kernels.Choice(None, "the runner is ops")
        if self.training:
            return kernels.Choice(None, "training needs gradients, which the kernels have not")
        return kernels.choose(T, self.head_dim, self.v_head_dim, dtype, self.conv_kernel)

    def mix_kernels(
        self, p: Projections, memory: Memory, padding: Padding | None = None
    ) -> tuple[mx.array, Memory]:
        """``mix`` by kernels, one launch for a few tokens."""
        parameters = self.kernel_parameters()
        if memory.state is None:
            memory = kernels.empty_memory(parameters, p.q.shape[0], p.q.dtype)
        lengths = None if padding is None else padding.lengths
        y, memory = kernels.mix(*p, parameters, memory, lengths=lengths, runner=self.runner)
        return y.reshape(p.v.shape), Memory(*memory)

    def kernel_parameters(self) -> kernels.Parameters:
        """What the kernels need of this layer."""
        return kernels.Parameters(
            H=self.num_heads,
            Hv=self.num_v_heads,
            Dk=self.head_dim,
            Dv=self.v_head_dim,
            conv_weight=(self.q_conv.conv.weight, self.k_conv.conv.weight, self.v_conv.conv.weight),
            gate=Gate(self.A_log, self.dt_bias, self.lower_bound),
            weight=self.o_norm.weight,
            eps=self.o_norm.eps,
            beta_kind="twice" if self.negative_eigenvalues else "sigmoid",
        )

    def mix_ops(
        self,
        p: Projections,
        memory: Memory,
        padding: Padding | None = None,
        path: str = "auto",
    ) -> tuple[mx.array, Memory]:
        """``mix`` by MLX operations, the recurrence by ``path`` of them."""
        y, memory = ops.mix(p, memory, self.kernel_parameters(), padding, path)
        return y.reshape(p.v.shape), memory
