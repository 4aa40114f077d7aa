"""MLA: no positions, two forms that agree, blocks that agree, padding that does not leak."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.tiny import difference
from mlx_lm.models.cache import KVCache
from tolerances import LAYER_FLOAT32 as FLOAT32

from mlx_kda.layers import MLA, mla

HIDDEN, HEADS, NOPE, ROPE, V, RANK = 48, 3, 16, 8, 24, 20


def make(seed: int = 0) -> MLA:
    mx.random.seed(seed)
    layer = MLA(HIDDEN, HEADS, NOPE, ROPE, V, RANK)
    layer.q_proj.weight = layer.q_proj.weight * 4  # scores far from uniform
    mx.eval(layer.parameters())
    return layer


def inputs(T: int, B: int = 1, seed: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal((B, T, HIDDEN)).astype(np.float32))


def oracle(layer: MLA, x: mx.array, rows: int = 0) -> np.ndarray:
    """Attention by its definition in float64, [T, hidden]; only the last ``rows`` if given."""
    f64 = lambda a: np.array(a, np.float64)  # noqa: E731
    x = f64(x[0])
    T = x.shape[0]
    q = (x @ f64(layer.q_proj.weight).T).reshape(T, HEADS, NOPE + ROPE)
    kv = x @ f64(layer.kv_a_proj_with_mqa.weight).T
    latent = kv[:, :RANK]
    latent = latent / np.sqrt((latent**2).mean(-1, keepdims=True) + 1e-6)
    latent = latent * f64(layer.kv_a_layernorm.weight)
    k = np.einsum("sr,hrn->shn", latent, f64(layer.embed_q.weight))
    k = np.concatenate([k, np.broadcast_to(kv[:, None, RANK:], (T, HEADS, ROPE))], -1)
    v = np.einsum("sr,hvr->shv", latent, f64(layer.unembed_out.weight))
    out = np.zeros((T, HEADS, V))
    for t in range(T - (rows or T), T):
        s = np.einsum("hd,shd->hs", q[t], k[: t + 1]) * (NOPE + ROPE) ** -0.5
        p = np.exp(s - s.max(-1, keepdims=True))
        out[t] = np.einsum("hs,shv->hv", p / p.sum(-1, keepdims=True), v[: t + 1])
    return out.reshape(T, -1) @ f64(layer.o_proj.weight).T


def test_the_order_of_the_past_does_not_matter():
    """Permute the first 11 of 12 tokens; the last row does not move. Both forms."""
    layer, x = make(), inputs(12)
    order = [*np.random.default_rng(3).permutation(11).tolist(), 11]
    for form in ("expanded", "absorbed"):
        layer.form = form
        straight = layer(x, "causal")[0, -1]
        permuted = layer(x[:, mx.array(order)], "causal")[0, -1]
        assert difference(permuted, straight) < FLOAT32
        # and the past does matter: without its first token the row is another
        assert difference(layer(x[:, 1:], "causal")[0, -1], straight) > 1e-2


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_the_scale_counts_both_parts(form):
    """Scores are scaled by (nope + rope)**-0.5, against float64."""
    layer, x = make(), inputs(17)
    layer.form = form
    assert difference(layer(x, "causal")[0], oracle(layer, x)) < FLOAT32


@pytest.mark.parametrize("S", [1, 255, 256, 257, 1023, 1024, 1025, 4096])
def test_absorbed_and_expanded_agree(S):
    """The last 1 and 5 tokens over S latents, both forms, and float64 for the last."""
    layer, x = make(), inputs(S)
    want = oracle(layer, x, rows=1)[-1]
    for last in {1, min(5, S)}:
        got = {}
        for form in ("expanded", "absorbed"):
            layer.form, cache = form, KVCache()
            if last < S:
                layer(x[:, : S - last], "causal", cache)
            got[form] = layer(
                x[:, S - last :], cache.make_mask(last, return_array=False, window_size=None), cache
            )
            assert difference(got[form][0, -1], want) < FLOAT32
        assert difference(got["absorbed"], got["expanded"]) < FLOAT32


def test_the_cheaper_form_is_chosen():
    layer = MLA(2304, 32, 128, 64, 128, 512)
    assert layer._absorbs(1, 1) and layer._absorbs(1, 131072)
    assert layer._absorbs(8, 4096)
    assert not layer._absorbs(2048, 2048)
    assert not layer._absorbs(2048, 131072)
    layer.form = "expanded"
    assert not layer._absorbs(1, 131072)
    layer.form = "absorbed"
    assert layer._absorbs(2048, 2048)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("budget", [1, 2000, 20000])
def test_blocks_of_heads_and_rows_change_nothing(monkeypatch, form, budget):
    layer, x = make(), inputs(70, B=2)
    layer.form = form
    mask = mx.tril(mx.ones((70, 70), dtype=mx.bool_))
    want = layer(x, "causal")
    monkeypatch.setattr(mla, "WORKSPACE", budget)
    assert difference(layer(x, "causal"), want) < FLOAT32
    assert difference(layer(x, mask), want) < FLOAT32
    cache = KVCache()
    layer(x[:, :33], "causal", cache)
    assert difference(layer(x[:, 33:], "causal", cache), want[:, 33:]) < FLOAT32


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8"])
def test_blocks_of_heads_of_quantised_projections(monkeypatch, mode):
    mx.random.seed(0)
    layer = MLA(64, 4, 32, 32, 32, 32)
    bits = 8 if mode == "mxfp8" else 4
    layer.embed_q = layer.embed_q.to_quantized(32, bits, mode)
    layer.unembed_out = layer.unembed_out.to_quantized(32, bits, mode)
    layer.form = "expanded"
    x = mx.random.normal((1, 40, 64))
    want = layer(x, "causal")
    monkeypatch.setattr(mla, "WORKSPACE", 1)
    assert difference(layer(x, "causal"), want) < FLOAT32


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_a_row_of_padding_gives_no_nan(form):
    """A query that may see nothing at all stays finite, in half precision too."""
    layer, x = make(), inputs(6)
    layer.form = form
    mask = mx.tril(mx.ones((6, 6), dtype=mx.bool_)) & (mx.arange(6) >= 3)
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        layer.set_dtype(dtype)
        assert mx.all(mx.isfinite(layer(50 * x.astype(dtype), mask))).item()


def test_prefill_of_a_long_context_stays_within_its_workspace(monkeypatch):
    """No [heads, queries, keys] array is made: the peak follows the workspace, not the product."""
    layer, T = make(), 1500
    layer.form = "expanded"
    x = inputs(T)
    mx.eval(layer.parameters(), x)

    def peak() -> int:
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(layer(x, "causal"))
        return mx.get_peak_memory() - before

    scores = HEADS * T * T * 4
    whole = peak()
    monkeypatch.setattr(mla, "WORKSPACE", scores // 100)
    blocks = peak()
    assert whole > scores
    assert blocks < scores / 2  # MLX allocates for some ten operations ahead of the one that runs
