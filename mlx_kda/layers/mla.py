"""Multi-head latent attention without positions (NoPE), over a cache of latents."""

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from ..cache.quantized_rows import WORKSPACE, Arrays, Causal, Packing, Part, Seen
from . import blas_layout
from .norm import RMSNorm
from .softmax import RunningSoftmax

# Rows of packed latents that are unpacked at a time.
UNPACKED = 1024
# Rows of queries that the CPU takes at a time: it computes what a mask hides, so that short blocks,
# each with the keys that its last row sees, halve a long prefill.
CPU_ROWS = 128
# Rows of queries from which laying the keys out costs less than it gains.
_FEW = 8


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
        """x [B, T, hidden]; mask None, "causal" or bool [B or 1, 1, T, S], True where seen.

        ``cache``: None, mlx-lm's KVCache or the like, or one that says by ``absorb`` what is seen.
        With ``cache.one_by_one`` the tokens are absorbed as so many steps of decoding would.
        """
        B, T, _ = x.shape
        q = (self.q_proj(x) * self.scale).reshape(B, T, self.num_heads, -1).transpose(0, 2, 1, 3)
        q_nope, q_rope = q[..., : self.nope], q[..., self.nope :]
        kv = self.kv_a_proj_with_mqa(x).astype(x.dtype)
        latents = self.kv_a_layernorm(kv[..., : self.kv_lora_rank])[:, None]
        shared = kv[..., self.kv_lora_rank :][:, None]
        if T > 1 and getattr(cache, "one_by_one", False):
            rows = (q_nope, q_rope, latents, shared)
            out = [self._attend(*(a[:, :, t : t + 1] for a in rows), None, cache) for t in range(T)]
            out = mx.concatenate(out, axis=2)
        else:
            out = self._attend(q_nope, q_rope, latents, shared, mask, cache)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(B, T, -1))

    def _attend(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        latents: mx.array,
        shared: mx.array,
        mask: mx.array | str | None,
        cache: Any,
    ) -> mx.array:
        """Scaled queries [B, H, T, .] over the cache and the tokens at hand -> [B, H, T, v]."""
        T = q_nope.shape[2]
        if T == 1 and isinstance(mask, str):
            mask = None  # the last token sees everything
        if hasattr(cache, "absorb"):
            seen = cache.absorb(latents, shared)
        else:
            if cache is not None:
                latents, shared = cache.update_and_fetch(latents, shared)
            mask = Causal(latents.shape[2] - T) if isinstance(mask, str) else mask
            seen = Seen([Part((latents,), (shared,))], mask)
        if self._absorbs(T, seen.length):
            return self._absorbed(q_nope, q_rope, seen)
        if seen.packed:
            return self._streamed(q_nope, q_rope, seen)
        return self._expanded(q_nope, q_rope, seen)

    def _absorbs(self, T: int, S: int) -> bool:
        """Whether T queries over S latents take fewer multiplications in the absorbed form."""
        if self.form != "auto":
            return self.form == "absorbed"
        lift = self.kv_lora_rank * (self.nope + self.v_dim)
        expanded = S * lift + T * S * (self.nope + self.rope + self.v_dim)
        absorbed = T * lift + T * S * (2 * self.kv_lora_rank + self.rope)
        return T == 1 or absorbed <= expanded

    def _absorbed(self, q_nope: mx.array, q_rope: mx.array, seen: Seen) -> mx.array:
        """Scaled queries [B, H, T, .] over the latents themselves -> [B, H, T, v]."""
        q = self.embed_q(q_nope)
        B, H, T, R = q.shape
        S, out = seen.length, []
        for rows in _slices(T, WORKSPACE // (B * H * S * q.dtype.size)):
            t = rows.stop - rows.start
            # All heads share the latents: heads and rows fold into one matrix product.
            q_latent = q[:, :, rows].reshape(B, 1, H * t, R)
            q_shared = q_rope[:, :, rows].reshape(B, 1, H * t, self.rope)
            scores = [
                _dot(part.packing[0], q_latent, part.latents)
                + _dot(part.packing[1], q_shared, part.shared)
                for part in seen.parts
            ]
            scores = _join(scores, axis=-1).reshape(B, H, t, S)
            scores = _hide(scores, seen.mask, rows, slice(0, S))
            weights = mx.softmax(scores, axis=-1, precise=True).reshape(B, 1, H * t, S)
            mixed, start = [], 0
            for part in seen.parts:
                stop = start + part.length
                mixed.append(part.packing[0].mix(weights[..., start:stop], part.latents))
                start = stop
            out.append(functools.reduce(mx.add, mixed).reshape(B, H, t, R))
        return self.unembed_out(_join(out, axis=2))

    def _expanded(self, q_nope: mx.array, q_rope: mx.array, seen: Seen) -> mx.array:
        """The same over every head's own keys and values."""
        latents, shared = seen.unpack()
        B, H, T, _ = q_nope.shape
        S = seen.length
        shared = blas_layout.as_right_factor(shared)
        most = CPU_ROWS if mx.default_device() == mx.cpu else T
        a_head = B * S * (self.nope + self.v_dim) * latents.dtype.size
        out = []
        for heads in _slices(H, WORKSPACE // a_head):
            k = _of_heads(self.embed_q, latents, heads, transpose=False)
            k = blas_layout.as_right_factor(k)
            v = _of_heads(self.unembed_out, latents, heads)
            n, blocks = heads.stop - heads.start, []
            for rows in _slices(T, min(most, WORKSPACE // (B * n * S * q_rope.dtype.size))):
                # Rows that none of these queries sees are left out where they are the last ones.
                upto = _last_seen(seen.mask, rows, S)
                bias = q_rope[:, heads, rows] @ shared[:, :, :upto].swapaxes(-1, -2)
                bias = _hide(bias, seen.mask, rows, slice(0, upto))
                q = q_nope[:, heads, rows]
                blocks.append(_attention(q, k[:, :, :upto], v[:, :, :upto], bias))
            out.append(_join(blocks, axis=2))
        return _join(out, axis=1)

    def _streamed(self, q_nope: mx.array, q_rope: mx.array, seen: Seen) -> mx.array:
        """The same over packed latents, a block of rows unpacked and expanded at a time."""
        B, H, T, _ = q_nope.shape
        out = []
        for heads in _slices(H, WORKSPACE // (B * T * UNPACKED * 4)):
            attention = RunningSoftmax()
            for start, block in seen.blocks(UNPACKED):
                latents, shared = block.unpack()
                k = _of_heads(self.embed_q, latents, heads, transpose=False)
                v = _of_heads(self.unembed_out, latents, heads)
                k, shared = (blas_layout.as_right_factor(a) for a in (k, shared))
                scores = q_nope[:, heads] @ k.swapaxes(-1, -2)
                scores = scores + q_rope[:, heads] @ shared.swapaxes(-1, -2)
                rows = slice(start, start + block.length)
                attention.add(_hide(scores, seen.mask, slice(0, T), rows), v)
            out.append(attention.result(q_nope.dtype))
        return _join(out, axis=1)


def _dot(packing: Packing, x: mx.array, arrays: Arrays) -> mx.array:
    """x [..., T, width] times every row of ``arrays``; rows kept as they are in the fast layout."""
    if packing.bits is None and x.shape[-2] >= _FEW:
        arrays = (blas_layout.as_right_factor(arrays[0]),)
    return packing.dot(x, arrays)


def _attention(q: mx.array, k: mx.array, v: mx.array, bias: mx.array) -> mx.array:
    """softmax(q k^T + bias) v"""
    if mx.default_device() == mx.cpu:  # no kernel there, and a softmax that waits for its exp
        attention = RunningSoftmax()
        attention.add(q @ k.swapaxes(-1, -2) + bias, v)
        return attention.result(q.dtype)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=bias)


def _slices(total: int, size: int) -> list[slice]:
    """Consecutive slices of at most ``size``, of at least 1, that cover ``total``."""
    size = max(1, size)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _last_seen(mask: Any, queries: slice, rows: int) -> int:
    """Rows before which lies all that the queries see."""
    if isinstance(mask, Causal) and mask.positions is None:
        return min(rows, mask.first + queries.stop)
    return rows


def _hide(scores: mx.array, mask: Any, queries: slice, rows: slice) -> mx.array:
    """Scores [B, H, queries, rows] with what the mask hides at a large negative number.

    The number is finite, so that a row of padding alone gives no NaN.
    """
    if mask is None:
        return scores
    visible = mask.visible(queries, rows) if isinstance(mask, Causal) else mask[..., queries, rows]
    hidden = mx.array(mx.finfo(scores.dtype).min / 2, dtype=scores.dtype)
    return mx.where(visible, scores, hidden)


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
