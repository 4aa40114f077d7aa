"""Multi-head latent attention without positions (NoPE), over a cache of latents."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from .norm import RMSNorm

# Bytes that one block of expanded keys and values, or of scores, may take. Longer contexts are
# worked through in blocks of heads and of query rows.
WORKSPACE = 64 * 2**20


class MLA(nn.Module):
    """Attention whose cache holds, for each token, one latent and one small shared key.

    ::

        latent, shared = split(kv_a(x));  latent = rmsnorm(latent)
        score = (q_nope . W_k latent + q_rope . shared) * (nope + rope)**-0.5
        y = o_proj(softmax(score) W_v latent)

    The part named rope is never rotated. Two forms compute the same: "expanded" forms every
    head's keys and values (many queries), "absorbed" carries W_k into the query and W_v into the
    output and attends over the latents (few queries). ``form`` "auto" takes the cheaper.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        nope: int,
        rope: int,
        v_dim: int,
        kv_lora_rank: int,
        latent_eps: float = 1e-6,
    ):
        super().__init__()
        self.num_heads, self.nope, self.rope, self.v_dim = num_heads, nope, rope, v_dim
        self.kv_lora_rank = kv_lora_rank
        self.scale = (nope + rope) ** -0.5
        self.form = "auto"
        self.q_proj = nn.Linear(hidden_size, num_heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, kv_lora_rank + rope, bias=False)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, eps=latent_eps)
        self.embed_q = MultiLinear(nope, kv_lora_rank, num_heads)
        self.unembed_out = MultiLinear(kv_lora_rank, v_dim, num_heads)
        self.o_proj = nn.Linear(num_heads * v_dim, hidden_size, bias=False)

    def __call__(
        self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None
    ) -> mx.array:
        """x [B, T, hidden]; mask None, "causal" or bool [B or 1, 1, T, S], True where seen."""
        B, T, _ = x.shape
        q = self.q_proj(x).reshape(B, T, self.num_heads, -1).transpose(0, 2, 1, 3)
        q_nope, q_rope = q[..., : self.nope], q[..., self.nope :] * self.scale
        kv = self.kv_a_proj_with_mqa(x).astype(x.dtype)
        latents = self.kv_a_layernorm(kv[..., : self.kv_lora_rank])[:, None]
        shared = kv[..., self.kv_lora_rank :][:, None]
        if cache is not None:
            latents, shared = cache.update_and_fetch(latents, shared)
        if T == 1 and isinstance(mask, str):
            mask = None  # the last token sees everything
        attend = self._absorbed if self._absorbs(T, latents.shape[2]) else self._expanded
        out = attend(q_nope, q_rope, latents, shared, mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(B, T, -1))

    def _absorbs(self, T: int, S: int) -> bool:
        """Whether T queries over S latents take fewer multiplications in the absorbed form."""
        if self.form != "auto":
            return self.form == "absorbed"
        lift = self.kv_lora_rank * (self.nope + self.v_dim)
        expanded = S * lift + T * S * (self.nope + self.rope + self.v_dim)
        absorbed = T * lift + T * S * (2 * self.kv_lora_rank + self.rope)
        return T == 1 or absorbed <= expanded

    def _absorbed(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        latents: mx.array,
        shared: mx.array,
        mask: mx.array | str | None,
    ) -> mx.array:
        """Queries [B, H, T, .] over latents [B, 1, S, .] -> [B, H, T, v]."""
        q = self.embed_q(q_nope) * self.scale
        out = []
        for rows, seen, bias in self._blocks(q_rope, shared, mask):
            B, H, t, R = q[:, :, rows].shape
            lat = latents[:, :, :seen]
            # All heads share the latents: heads and rows fold into one matrix product.
            scores = (q[:, :, rows].reshape(B, 1, H * t, R) @ lat.swapaxes(-1, -2)).reshape(
                B, H, t, seen
            )
            weights = mx.softmax(scores + bias, axis=-1, precise=True)
            out.append((weights.reshape(B, 1, H * t, seen) @ lat).reshape(B, H, t, R))
        return self.unembed_out(_join(out, axis=2))

    def _expanded(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        latents: mx.array,
        shared: mx.array,
        mask: mx.array | str | None,
    ) -> mx.array:
        B, H = q_nope.shape[:2]
        S = latents.shape[2]
        a_head = B * S * (self.nope + self.v_dim) * latents.dtype.size
        step = max(1, min(H, WORKSPACE // a_head))
        out = []
        for start in range(0, H, step):
            heads = slice(start, min(start + step, H))
            k = _of_heads(self.embed_q, latents, heads, transpose=False)
            v = _of_heads(self.unembed_out, latents, heads)
            q = q_nope[:, heads]
            blocks = [
                mx.fast.scaled_dot_product_attention(
                    q[:, :, rows], k[:, :, :seen], v[:, :, :seen], scale=self.scale, mask=bias
                )
                for rows, seen, bias in self._blocks(q_rope[:, heads], shared, mask)
            ]
            out.append(_join(blocks, axis=2))
        return _join(out, axis=1)

    def _blocks(self, q_rope: mx.array, shared: mx.array, mask: mx.array | str | None):
        """Blocks of query rows as (rows, keys seen, additive scores [B, H, rows, keys]).

        The additive scores are the shared keys' part, with what the mask hides at a large
        negative number: finite, so that a row of padding alone gives no NaN.
        """
        B, H, T, _ = q_rope.shape
        S = shared.shape[2]
        step = max(1, min(T, WORKSPACE // (B * H * S * q_rope.dtype.size)))
        hidden = mx.array(mx.finfo(q_rope.dtype).min / 2, dtype=q_rope.dtype)
        for start in range(0, T, step):
            stop = min(start + step, T)
            seen = S - T + stop if isinstance(mask, str) else S
            keys = shared[:, :, :seen].swapaxes(-1, -2)
            bias = q_rope[:, :, start:stop] @ keys
            if isinstance(mask, str):
                last = mx.arange(S - T + start, seen)[:, None]
                bias = mx.where(mx.arange(seen) <= last, bias, hidden)
            elif mask is not None:
                bias = mx.where(mask[..., start:stop, :], bias, hidden)
            yield slice(start, stop), seen, bias


def _of_heads(layer: nn.Module, x: mx.array, heads: slice, transpose: bool = True) -> mx.array:
    """``layer(x)`` for some of its heads."""
    if heads.stop - heads.start == layer.weight.shape[0]:
        return layer(x, transpose)
    if isinstance(layer, QuantizedMultiLinear):
        biases = layer.get("biases")
        return mx.quantized_matmul(
            x,
            layer.weight[heads],
            scales=layer.scales[heads],
            biases=None if biases is None else biases[heads],
            transpose=transpose,
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        )
    weight = layer.weight[heads]
    return x @ (weight.swapaxes(-1, -2) if transpose else weight)


def _join(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)
