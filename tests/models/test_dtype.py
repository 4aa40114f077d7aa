"""Activations keep the checkpoint's dtype; states, gates and router biases keep float32."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.tiny import tiny_config, tiny_model, tiny_weights, tokens, write_model
from mlx.utils import tree_flatten, tree_unflatten

from mlx_kda.models import load_model
from mlx_kda.models.hybrid import DecoderLayer

IDS = tokens(24)
FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias")
HALVES = [mx.float16, mx.bfloat16]


def half_weights(dtype: mx.Dtype) -> dict[str, mx.array]:
    weights = tiny_weights(tiny_config())
    return {k: w if k.endswith(FLOAT32) else w.astype(dtype) for k, w in weights.items()}


def half_model(dtype: mx.Dtype):
    model = tiny_model()
    model.update(tree_unflatten(list(half_weights(dtype).items())))
    return model


def layer_dtypes(model, cache) -> list[mx.Dtype]:
    """Of the hidden states after the embedding and after each layer, and of the logits."""
    seen = []
    call = DecoderLayer.__call__

    def watched(self, x, *rest):
        y = call(self, x, *rest)
        seen.extend([x.dtype, y.dtype])
        return y

    DecoderLayer.__call__ = watched
    try:
        seen.append(model(IDS, cache=cache).dtype)
    finally:
        DecoderLayer.__call__ = call
    assert len(seen) == 2 * len(model.layers) + 1
    return seen


def check_cache(cache, dtype: mx.Dtype) -> None:
    for c in cache[:3]:
        assert [a.dtype for a in c.cache] == [dtype] * 3 + [mx.float32]
    assert cache[3].keys.dtype == dtype and cache[3].values.dtype == dtype


@pytest.mark.parametrize("dtype", HALVES)
def test_activations_of_every_layer_are_16_bit(dtype):
    """In a 16-bit model whose gate parameters are float32 nothing else becomes float32."""
    model = half_model(dtype)
    cache = model.make_cache()
    assert set(layer_dtypes(model, cache)) == {dtype}
    check_cache(cache, dtype)
    assert layer_dtypes(model, cache)[-1] == dtype  # and when it is continued
    check_cache(cache, dtype)


# One parameter of every kind. The head is left out: it makes the logits, not an activation.
KINDS = [
    name
    for name in tiny_weights(tiny_config())
    if name.startswith(("model.layers.0.", "model.layers.1.mlp", "model.layers.3.self_attn"))
    and not name.endswith(FLOAT32)
] + ["model.norm.weight"]


@pytest.mark.parametrize("name", KINDS)
def test_one_float32_parameter_does_not_widen_the_model(name):
    """Whichever parameter is float32, no layer's output and no cache becomes float32."""
    model = half_model(mx.bfloat16)
    model.update(tree_unflatten([(name, tiny_weights(tiny_config())[name])]))
    cache = model.make_cache()
    dtypes = layer_dtypes(model, cache)
    assert set(dtypes) == {mx.bfloat16}
    check_cache(cache, mx.bfloat16)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_loaded_16_bit_model(tmp_path, dtype):
    """Router weights are widened; a float32 embedding among 16-bit weights is narrowed."""
    weights = half_weights(dtype)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].astype(mx.float32)
    model = load_model(write_model(tmp_path / "m", tiny_config(), weights))
    for name, p in tree_flatten(model.parameters()):
        wide = name.endswith((*FLOAT32, "mlp.gate.weight"))
        assert p.dtype == (mx.float32 if wide else dtype), name
    assert set(layer_dtypes(model, model.make_cache())) == {dtype}
    assert mx.array_equal(model(IDS), half_model(dtype)(IDS))


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4", "mxfp8"])
def test_a_quantised_embedding_does_not_change_the_dtype(mode):
    """MLX dequantises the float formats to bfloat16, whatever the model's dtype."""
    for dtype in (mx.float32, mx.float16):
        model = tiny_model() if dtype == mx.float32 else half_model(dtype)
        group, bits = {"nvfp4": (16, 4), "mxfp4": (32, 4)}.get(mode, (32, 8))
        nn.quantize(model.model, group, bits, mode=mode)
        cache = model.make_cache()
        assert set(layer_dtypes(model, cache)) == {dtype}
        check_cache(cache, dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_logits_are_near_the_float32_ones(dtype):
    """Catches a mistake rather than bounds the model; for most tokens, since experts may flip."""
    rounded = {k: w.astype(mx.float32) for k, w in half_weights(dtype).items()}
    exact = tiny_model()
    exact.update(tree_unflatten(list(rounded.items())))
    want = exact(IDS)
    errors = mx.abs(half_model(dtype)(IDS).astype(mx.float32) - want).max(axis=-1)
    typical = mx.median(errors) / mx.abs(want).max()
    assert typical < {mx.float16: 0.005, mx.bfloat16: 0.04}[dtype]


def test_kernels_are_checked_in_the_dtype_that_they_run_in(tmp_path, monkeypatch):
    """A float32 final norm does not make the self-check one of float32."""
    weights = half_weights(mx.bfloat16)
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(mx.float32)
    asked = []
    monkeypatch.setattr("mlx_kda.models.loading.prepare", lambda model, dtype: asked.append(dtype))
    load_model(write_model(tmp_path, tiny_config(), weights))
    assert asked == [mx.bfloat16]
