"""Multi-head latent attention (MLA) without position encoding (NoPE), over a latent cache."""

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from ..cache.policy import RowFormat
from ..cache.quantized_rows import WORKSPACE, Arrays, Causal, Part, Seen, matmul
from ..ops.elementwise import exp
from . import blas_layout
from .norm import RMSNorm

# Quantised rows that are dequantised at a time.
DEQUANTIZED = 1024
# Rows of queries that the CPU takes at a time: it computes what a mask hides, so short blocks, each
# with the keys that its last row sees, halve the time of a long prefill.
CPU_ROWS = 128
# Rows of queries from which laying the keys out costs less than it gains.
_FEW = 8


class MLA(nn.Module):
    """Attention whose cache holds, per token, one latent and one small key for all heads.

    ::

        kv_latent, k_pe = split(kv_a(x));  kv_latent = rmsnorm(kv_latent)
        score = (q_nope . W_k kv_latent + q_pe . k_pe) * (nope + rope)**-0.5
        y = o_proj(softmax(score) W_v kv_latent)

    The part named pe is never rotated. Two forms compute the same: "expanded" forms every head's
    keys and values (many queries), "absorbed" applies W_k to the query and W_v to the output and
    attends over the latents (few queries). ``form`` "auto" takes the cheaper.
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

        ``cache``: None, mlx-lm's KVCache or the like, or one whose ``absorb`` returns what is seen.
        With ``cache.one_by_one`` the tokens are absorbed one by one, as by steps of decoding.
        """
        B, T, _ = x.shape
        q = (self.q_proj(x) * self.scale).reshape(B, T, self.num_heads, -1).transpose(0, 2, 1, 3)
        q_nope, q_pe = q[..., : self.nope], q[..., self.nope :]
        kv = self.kv_a_proj_with_mqa(x).astype(x.dtype)
        kv_latent = self.kv_a_layernorm(kv[..., : self.kv_lora_rank])[:, None]
        k_pe = kv[..., self.kv_lora_rank :][:, None]
        if T > 1 and getattr(cache, "one_by_one", False):
            steps = []
            for t in range(T):
                q_n, q_p, latent, k = (a[:, :, t : t + 1] for a in (q_nope, q_pe, kv_latent, k_pe))
                steps.append(self._attend(q_n, q_p, latent, k, None, cache))
            out = mx.concatenate(steps, axis=2)
        else:
            out = self._attend(q_nope, q_pe, kv_latent, k_pe, mask, cache)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(B, T, -1))

    def _attend(
        self,
        q_nope: mx.array,
        q_pe: mx.array,
        kv_latent: mx.array,
        k_pe: mx.array,
        mask: mx.array | str | None,
        cache: Any,
    ) -> mx.array:
        """Scaled queries [B, H, T, .] over the cache and the tokens at hand -> [B, H, T, v]."""
        T = q_nope.shape[2]
        if T == 1 and isinstance(mask, str):
            mask = None  # the last token sees everything
        if hasattr(cache, "absorb"):
            seen = cache.absorb(kv_latent, k_pe)
        else:
            if cache is not None:
                kv_latent, k_pe = cache.update_and_fetch(kv_latent, k_pe)
            rule = Causal(kv_latent.shape[2] - T) if isinstance(mask, str) else mask
            seen = Seen([Part((kv_latent,), (k_pe,))], rule)
        if self._absorbs(T, seen.length):
            return self._absorbed(q_nope, q_pe, seen)
        if seen.quantized:
            return self._streamed(q_nope, q_pe, seen)
        return self._expanded(q_nope, q_pe, seen)

    def _absorbs(self, T: int, S: int) -> bool:
        """Whether T queries over S latents take fewer multiplications in the absorbed form."""
        if self.form != "auto":
            return self.form == "absorbed"
        lift = self.kv_lora_rank * (self.nope + self.v_dim)
        expanded = S * lift + T * S * (self.nope + self.rope + self.v_dim)
        absorbed = T * lift + T * S * (2 * self.kv_lora_rank + self.rope)
        return T == 1 or absorbed <= expanded

    def _absorbed(self, q_nope: mx.array, q_pe: mx.array, seen: Seen) -> mx.array:
        """Scaled queries [B, H, T, .] over the latents themselves -> [B, H, T, v]."""
        q = self.embed_q(q_nope)
        B, H, T, R = q.shape
        S, out = seen.length, []
        for rows in _slices(T, WORKSPACE // (B * H * S * q.dtype.size)):
            t = rows.stop - rows.start
            # All heads share the latents: heads and rows fold into one matrix product.
            q_latent = q[:, :, rows].reshape(B, 1, H * t, R)
            q_pe_rows = q_pe[:, :, rows].reshape(B, 1, H * t, self.rope)
            of_parts = [
                _scores(q_latent, part.kv_latent, part.formats[0])
                + _scores(q_pe_rows, part.k_pe, part.formats[1])
                for part in seen.parts
            ]
            scores = _join(of_parts, axis=-1).reshape(B, H, t, S)
            scores = _hide(scores, seen.mask, rows, slice(0, S))
            weights = mx.softmax(scores, axis=-1, precise=True).reshape(B, 1, H * t, S)
            mixed, start = [], 0
            for part in seen.parts:
                stop = start + part.length
                some, form = weights[..., start:stop], part.formats[0]
                mixed.append(matmul(some, part.kv_latent, form, transpose=False))
                start = stop
            out.append(functools.reduce(mx.add, mixed).reshape(B, H, t, R))
        return self.unembed_out(_join(out, axis=2))

    def _expanded(self, q_nope: mx.array, q_pe: mx.array, seen: Seen) -> mx.array:
        """The same over every head's own keys and values."""
        kv_latent, k_pe = seen.dequantize()
        B, H, T, _ = q_nope.shape
        S = seen.length
        k_pe = blas_layout.as_right_factor(k_pe)
        most = CPU_ROWS if mx.default_device() == mx.cpu else T
        a_head = B * S * (self.nope + self.v_dim) * kv_latent.dtype.size
        out = []
        for heads in _slices(H, WORKSPACE // a_head):
            k = _of_heads(self.embed_q, kv_latent, heads, transpose=False)
            k = blas_layout.as_right_factor(k)
            v = _of_heads(self.unembed_out, kv_latent, heads)
            n, blocks = heads.stop - heads.start, []
            for rows in _slices(T, min(most, WORKSPACE // (B * n * S * q_pe.dtype.size))):
                # Rows that none of these queries sees are left out where they are the last ones.
                upto = _last_seen(seen.mask, rows, S)
                bias = q_pe[:, heads, rows] @ k_pe[:, :, :upto].swapaxes(-1, -2)
                bias = _hide(bias, seen.mask, rows, slice(0, upto))
                q = q_nope[:, heads, rows]
                blocks.append(_attention(q, k[:, :, :upto], v[:, :, :upto], bias))
            out.append(_join(blocks, axis=2))
        return _join(out, axis=1)

    def _streamed(self, q_nope: mx.array, q_pe: mx.array, seen: Seen) -> mx.array:
        """The same over quantised rows, a block of them dequantised and expanded at a time."""
        B, H, T, _ = q_nope.shape
        out = []
        for heads in _slices(H, WORKSPACE // (B * T * DEQUANTIZED * 4)):
            attention = RunningSoftmax()
            for start, block in seen.blocks(DEQUANTIZED):
                kv_latent, k_pe = block.dequantize()
                k = _of_heads(self.embed_q, kv_latent, heads, transpose=False)
                v = _of_heads(self.unembed_out, kv_latent, heads)
                k, k_pe = (blas_layout.as_right_factor(a) for a in (k, k_pe))
                scores = q_nope[:, heads] @ k.swapaxes(-1, -2)
                scores = scores + q_pe[:, heads] @ k_pe.swapaxes(-1, -2)
                rows = slice(start, start + block.length)
                attention.add(_hide(scores, seen.mask, slice(0, T), rows), v)
            out.append(attention.result(q_nope.dtype))
        return _join(out, axis=1)


class RunningSoftmax:
    """``softmax(scores) @ values`` over all blocks added, held as maximum, sum and weighted sum.

    ::

        m' = max(m, max(scores));  p = exp(scores - m')
        sum = sum * exp(m - m') + sum(p);  acc = acc * exp(m - m') + p @ values

    in float32, whatever the blocks are.
    """

    def __init__(self) -> None:
        self.max: mx.array | None = None
        self.sum = self.acc = mx.array(0.0)

    def add(self, scores: mx.array, values: mx.array) -> None:
        """scores [..., T, S]; values [..., S, D]."""
        scores = scores.astype(mx.float32)
        top = scores.max(axis=-1, keepdims=True)
        if self.max is not None:
            top = mx.maximum(self.max, top)
        weights = exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        mixed = (weights.astype(values.dtype) @ values).astype(mx.float32)
        if self.max is not None:
            kept = exp(self.max - top)
            total, mixed = self.sum * kept + total, self.acc * kept + mixed
        self.max, self.sum, self.acc = top, total, mixed

    def result(self, dtype: mx.Dtype) -> mx.array:
        """The weighted mean of all values, [..., T, D]."""
        return (self.acc / self.sum).astype(dtype)


def _scores(x: mx.array, rows: Arrays, form: RowFormat) -> mx.array:
    """x [..., T, width] times every row -> [..., T, S]; unquantised rows in the fast layout."""
    if form.bits is None and x.shape[-2] >= _FEW:
        rows = (blas_layout.as_right_factor(rows[0]),)
    return matmul(x, rows, form, transpose=True)


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
