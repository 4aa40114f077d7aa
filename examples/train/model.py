"""Kimi Linear in PyTorch, small and fast to train: module names are the hub's tensor names.

On a CUDA machine the recurrence, the short convolutions and the gated norm are FLA's Triton
kernels; on a CPU plain PyTorch takes their place, for tests at toy size. The experts are
computed densely and masked by the router's weights: with 16 experts of 64 channels that is
cheaper than sorting tokens.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Config:
    """Sizes of the model. `full_attention` holds 0-based layer numbers."""

    vocab: int
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    head_dim: int = 64
    conv: int = 4
    full_attention: tuple[int, ...] = (3, 7)
    nope: int = 64
    rope: int = 32
    v_dim: int = 64
    kv_lora: int = 128
    dense_hidden: int = 640
    dense_layers: int = 1
    experts: int = 16
    expert_hidden: int = 64
    top_k: int = 4
    routed_scale: float = 2.446
    eps: float = 1e-5
    gate_bias: bool = False  # FLA's pure KDA models have a bias on the output gate


def pure_kda(vocab: int) -> Config:
    """The sizes of the second checkpoint: KDA in every layer, dense MLPs (FLA's `kda`)."""
    return Config(
        vocab,
        hidden=192,
        layers=6,
        heads=3,
        full_attention=(),
        dense_hidden=448,
        dense_layers=6,
        eps=1e-6,
        gate_bias=True,
    )


class Norm(nn.Module):
    """RMSNorm over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    """A linear layer; its weight is drawn in `Model.reset`."""
    return nn.Linear(inputs, outputs, bias=bias)


class ShortConv(nn.Module):
    """Depthwise causal convolution and SiLU on [B, T, C]; weight [C, 1, taps] as on the hub."""

    def __init__(self, channels: int, taps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))

    def forward(self, x: Tensor) -> Tensor:
        taps = self.weight.shape[-1]
        if x.is_cuda:
            from fla.modules.causal_conv1d import causal_conv1d

            return causal_conv1d(x, weight=self.weight.squeeze(1), activation="silu")[0]
        y = F.conv1d(F.pad(x.mT, (taps - 1, 0)), self.weight, groups=x.shape[-1])
        return F.silu(y.mT)


def plain_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence token by token, [B, T, H, D] in float32."""
    norm = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q.float(), k.float())]
    q, k, v = norm[0] * q.shape[-1] ** -0.5, norm[1], v.float()
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, :, None].exp()
        erased = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        write = beta[:, t, :, None] * erased
        state = state + k[:, t, :, :, None] * write[:, :, None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1)


class GatedNorm(nn.Module):
    """RMSNorm over the head's channels times the sigmoid of the gate."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if x.is_cuda:
            from fla.modules.norm.fused_norm_gate import rms_norm_gated

            return rms_norm_gated(x, gate, self.weight, None, activation="sigmoid", eps=self.eps)
        y = F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)
        return y * gate.float().sigmoid()


class DeltaAttention(nn.Module):
    """Kimi Delta Attention."""

    def __init__(self, c: Config):
        super().__init__()
        inner = c.heads * c.head_dim
        self.heads, self.head_dim = c.heads, c.head_dim
        self.q_proj, self.k_proj, self.v_proj = (linear(c.hidden, inner) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(inner, c.conv) for _ in range(3))
        self.f_a_proj, self.f_b_proj = linear(c.hidden, c.head_dim), linear(c.head_dim, inner)
        self.g_a_proj = linear(c.hidden, c.head_dim)
        self.g_b_proj = linear(c.head_dim, inner, bias=c.gate_bias)
        self.b_proj = linear(c.hidden, c.heads)
        self.A_log = nn.Parameter(torch.empty(1, 1, c.heads, 1))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.o_norm = GatedNorm(c.head_dim, c.eps)
        self.o_proj = linear(inner, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, self.head_dim)
        q = self.q_conv1d(self.q_proj(x)).view(shape)
        k = self.k_conv1d(self.k_proj(x)).view(shape)
        v = self.v_conv1d(self.v_proj(x)).view(shape)
        decay = self.f_b_proj(self.f_a_proj(x)).view(shape)
        beta = self.b_proj(x)
        if x.is_cuda:
            from fla.ops.kda import chunk_kda

            out, _ = chunk_kda(
                q,
                k,
                v,
                decay,
                beta,
                A_log=self.A_log.view(-1),
                dt_bias=self.dt_bias,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
            )
        else:
            bias = self.dt_bias.view(1, 1, self.heads, self.head_dim)
            g = -self.A_log.exp() * F.softplus(decay.float() + bias)
            out = plain_kda(q, k, v, g, beta.float().sigmoid())
        gate = self.g_b_proj(self.g_a_proj(x)).view(shape)
        return self.o_proj(self.o_norm(out, gate).flatten(2).to(x.dtype))


class LatentAttention(nn.Module):
    """Multi-head latent attention without positions (NoPE)."""

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.q_proj = linear(c.hidden, c.heads * (c.nope + c.rope))
        self.kv_a_proj_with_mqa = linear(c.hidden, c.kv_lora + c.rope)
        self.kv_a_layernorm = Norm(c.kv_lora, 1e-6)
        self.kv_b_proj = linear(c.kv_lora, c.heads * (c.nope + c.v_dim))
        self.o_proj = linear(c.heads * c.v_dim, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        c = self.c
        batch, length = x.shape[:2]
        q = self.q_proj(x).view(batch, length, c.heads, -1).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x).split([c.kv_lora, c.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent).to(x.dtype))
        k, v = kv.view(batch, length, c.heads, -1).transpose(1, 2).split([c.nope, c.v_dim], -1)
        k = torch.cat([k, shared[:, None].expand(-1, c.heads, -1, -1)], -1)
        v = F.pad(v, (0, k.shape[-1] - c.v_dim))  # the flash kernel wants one head size
        out = F.scaled_dot_product_attention(
            q, k.to(q.dtype), v.to(q.dtype), is_causal=True, scale=(c.nope + c.rope) ** -0.5
        )
        return self.o_proj(out[..., : c.v_dim].transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, inner), linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; the correction bias takes part in the choice only."""

    def __init__(self, c: Config):
        super().__init__()
        self.top_k, self.scale = c.top_k, c.routed_scale
        self.weight = nn.Parameter(torch.empty(c.experts, c.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.experts))
        self.register_buffer("load", torch.zeros(c.experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Weights [..., experts], zero for the experts not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight).sigmoid()
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        mask = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        if self.training:
            self.load += mask.detach().flatten(0, -2).sum(0)
        scores = scores * mask
        return scores / (scores.sum(-1, keepdim=True) + 1e-20) * self.scale

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Loss-free balancing: raise the bias of experts that were chosen too seldom."""
        self.e_score_correction_bias += rate * (self.load.mean() - self.load).sign()
        self.load.zero_()


class Experts(nn.Module):
    """All experts at once; w1 gate, w3 up [E, inner, hidden], w2 down [E, hidden, inner]."""

    def __init__(self, c: Config):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(c.experts, c.expert_hidden, c.hidden))
        self.w3 = nn.Parameter(torch.empty(c.experts, c.expert_hidden, c.hidden))
        self.w2 = nn.Parameter(torch.empty(c.experts, c.hidden, c.expert_hidden))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        inner = F.silu(F.linear(x, self.w1.flatten(0, 1))) * F.linear(x, self.w3.flatten(0, 1))
        inner = inner.unflatten(-1, self.w1.shape[:2]) * weights.unsqueeze(-1).to(inner.dtype)
        return F.linear(inner.flatten(-2), self.w2.transpose(1, 2).flatten(0, 1).T)


class MoE(nn.Module):
    """Routed experts and one shared expert."""

    def __init__(self, c: Config):
        super().__init__()
        self.gate = Router(c)
        self.experts = Experts(c)
        self.shared_experts = MLP(c.hidden, c.expert_hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.gate(x)) + self.shared_experts(x)


class Layer(nn.Module):
    """Attention or KDA, then MLP or MoE, each behind a norm."""

    def __init__(self, c: Config, number: int):
        super().__init__()
        self.input_layernorm = Norm(c.hidden, c.eps)
        self.post_attention_layernorm = Norm(c.hidden, c.eps)
        full = number in c.full_attention
        self.self_attn = LatentAttention(c) if full else DeltaAttention(c)
        if number < c.dense_layers:
            self.mlp = MLP(c.hidden, c.dense_hidden)
        else:
            self.block_sparse_moe = MoE(c)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x is the residual stream, float32; the blocks compute in `dtype`."""
        x = x + self.self_attn(self.input_layernorm(x).to(dtype))
        block = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return x + block(self.post_attention_layernorm(x).to(dtype))


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, c: Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c, n) for n in range(c.layers))
        self.norm = Norm(c.hidden, c.eps)


class Model(nn.Module):
    """The language model; `forward` gives logits in the compute dtype."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = linear(config.hidden, config.vocab)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw every parameter on the CPU from a seed."""
        draw = torch.Generator().manual_seed(seed)
        depth = (2 * self.config.layers) ** -0.5
        for name, p in self.named_parameters():
            kind = name.split(".")[-2] if name.endswith("weight") else name.split(".")[-1]
            if p.dim() == 1 and "dt_bias" not in name:
                p.fill_(0.0 if name.endswith(".bias") else 1.0)
            elif kind == "A_log":
                p.copy_((torch.rand(p.shape, generator=draw) * 15 + 1).log())
            elif kind == "dt_bias":
                low, high = math.log(1e-3), math.log(1e-1)
                step = (torch.rand(p.shape, generator=draw) * (high - low) + low).exp()
                p.copy_(step + torch.log(-torch.expm1(-step)))
            elif kind == "embed_tokens":
                p.copy_(torch.randn(p.shape, generator=draw) * 0.1)
            elif kind.endswith("conv1d"):
                p.copy_(torch.rand(p.shape, generator=draw) - 0.5)
            else:
                small = depth if kind in ("o_proj", "down_proj", "w2") else 1.0
                std = 0.5 * p.shape[-1] ** -0.5 * small
                p.copy_(torch.randn(p.shape, generator=draw) * std)

    def hidden(self, ids: Tensor) -> Tensor:
        """The final normed hidden states [B, T, hidden], in the compute dtype."""
        device = ids.device.type
        cast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if cast else torch.float32
        x = self.model.embed_tokens(ids).float()
        for layer in self.model.layers:
            x = layer(x, dtype)
        return self.model.norm(x).to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.hidden(ids))

    def routers(self) -> list[Router]:
        """Every router, in the order of the layers."""
        return [m for m in self.modules() if isinstance(m, Router)]
