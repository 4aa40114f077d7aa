"""The router against numpy float64, and experts where MLX's CPU has no 16-bit gather."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers.tiny import difference
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear
from tolerances import LAYER_FLOAT32 as FLOAT32
from tolerances import LAYER_HALF

from mlx_kda.layers import MoE, merged, moe
from mlx_kda.layers.moe import route


def oracle(logits, bias, top_k, groups=1, kept=1, activation="sigmoid", renormalize=True, scale=1):
    """Chosen experts (as sets) and dense weights [N, E], float64."""
    x = np.asarray(logits, np.float64)
    if activation == "sigmoid":
        scores = 1 / (1 + np.exp(-x))
    else:
        scores = np.exp(x - x.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    weights = np.zeros_like(scores)
    sets = []
    for n, row in enumerate(scores + np.asarray(bias, np.float64)):
        by_group = row.reshape(groups, -1)
        best = np.sort(by_group, axis=-1)[:, -2:].sum(-1)
        allowed = np.argsort(-best)[:kept]
        masked = np.full(by_group.shape, -np.inf)
        masked[allowed] = by_group[allowed]
        chosen = np.argsort(-masked.reshape(-1))[:top_k]
        w = scores[n, chosen]
        weights[n, chosen] = (w / w.sum() if renormalize else w) * scale
        sets.append(set(chosen.tolist()))
    return sets, weights


def dense(chosen: mx.array, weights: mx.array, experts: int) -> np.ndarray:
    out = np.zeros((chosen.shape[0], experts))
    np.put_along_axis(out, np.array(chosen), np.array(weights, np.float64), axis=-1)
    return out


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("groups, kept", [(1, 1), (4, 4), (4, 2), (8, 1), (8, 7)])
def test_the_router_against_float64(activation, renormalize, groups, kept):
    rng = np.random.default_rng(groups * 10 + kept)
    logits = rng.standard_normal((64, 32)).astype(np.float32)
    bias = rng.uniform(-0.8, 0.2, 32).astype(np.float32)
    options = {"activation": activation, "renormalize": renormalize, "scale": 2.446}
    sets, want = oracle(logits, bias, 3, groups, kept, **options)
    chosen, weights = route(
        mx.array(logits), mx.array(bias), top_k=3, groups=groups, kept_groups=kept, **options
    )
    assert [set(row) for row in chosen.tolist()] == sets
    assert np.abs(dense(chosen, weights, 32) - want).max() < FLOAT32


def test_masked_groups_stay_out_when_every_biased_score_is_negative():
    """A masked group filled with 0.0 would win over negative scores; -inf does not."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((200, 16)).astype(np.float32)
    bias = np.full(16, -3.0, np.float32)
    sets, _ = oracle(logits, bias, 4, 4, 2)
    chosen, _ = route(mx.array(logits), mx.array(bias), top_k=4, groups=4, kept_groups=2)
    assert [set(row) for row in chosen.tolist()] == sets
    assert all(len({e // 4 for e in row}) <= 2 for row in chosen.tolist())


def test_the_router_bias_is_not_rounded():
    """256 experts, bias ~ U(6.817, 7.063), top 8: no token picks other experts."""
    rng = np.random.default_rng(5)
    bias = rng.uniform(6.817, 7.063, 256).astype(np.float32)
    layer = MoE(64, 32, 256, top_k=8)
    layer.gate.weight = mx.array(rng.standard_normal((256, 64)).astype(np.float32) / 8)
    layer.e_score_correction_bias = mx.array(bias)
    x = rng.standard_normal((2000, 64)).astype(np.float32)
    logits = x.astype(np.float64) @ np.array(layer.gate.weight, np.float64).T
    sets, _ = oracle(logits, bias, 8)
    # where the 8th and 9th are closer than float32 can tell, either is right
    order = np.sort(1 / (1 + np.exp(-logits)) + bias, axis=-1)
    clear = order[:, -8] - order[:, -9] > 4e-6

    def wrong() -> float:
        got = [set(row) for row in select(layer, mx.array(x))[0].tolist()]
        return np.mean([a != b for a, b, c in zip(got, sets, clear, strict=True) if c])

    assert clear.mean() > 0.99
    assert wrong() == 0
    layer.e_score_correction_bias = mx.array(bias).astype(mx.bfloat16)
    assert wrong() > 0.3  # what the case warns of would be seen here


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_router_is_float32_under_16_bit_activations(dtype):
    """16-bit logits would move the choice as much as a 16-bit bias does."""
    rng = np.random.default_rng(6)
    layer = MoE(64, 32, 64, top_k=4)
    layer.set_dtype(dtype)
    layer.e_score_correction_bias = mx.array(rng.uniform(6.8, 7.1, 64).astype(np.float32))
    x = mx.array(rng.standard_normal((500, 64)).astype(np.float32)).astype(dtype)
    logits = np.array(x.astype(mx.float32), np.float64)
    logits = logits @ np.array(layer.gate.weight.astype(mx.float32), np.float64).T
    sets, _ = oracle(logits, np.array(layer.e_score_correction_bias), 4)
    chosen, weights = select(layer, x)
    assert weights.dtype == mx.float32
    same = np.mean([set(a) == b for a, b in zip(chosen.tolist(), sets, strict=True)])
    assert same > 0.995


def select(layer: MoE, x: mx.array) -> tuple[mx.array, mx.array]:
    return layer.route(layer.gate(x.astype(mx.float32)), x.dtype)


def expert_oracle(layer: MoE, x: mx.array) -> np.ndarray:
    f64 = lambda a: np.array(a.astype(mx.float32), np.float64)  # noqa: E731
    silu = lambda a: a / (1 + np.exp(-a))  # noqa: E731
    chosen, weights = select(layer, x)
    x = f64(x)
    gate, up, down = (
        f64(getattr(layer.switch_mlp, f"{n}_proj").weight) for n in ("gate", "up", "down")
    )
    out = np.zeros_like(x)
    for n, (experts, ws) in enumerate(zip(chosen.tolist(), weights.tolist(), strict=True)):
        for e, w in zip(experts, ws, strict=True):
            out[n] += w * (down[e] @ (silu(gate[e] @ x[n]) * (up[e] @ x[n])))
    if layer.shared_experts is not None:
        g, u, d = (
            f64(getattr(layer.shared_experts, f"{n}_proj").weight) for n in ("gate", "up", "down")
        )
        out += (silu(x @ g.T) * (x @ u.T)) @ d.T
    return out


@pytest.mark.parametrize("shared", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, 5, 70])  # below and above where mlx-lm sorts by expert
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("merged", [False, True])
def test_experts_against_float64(shared, rows, dtype, merged):
    mx.random.seed(0)
    layer = MoE(32, 16, 11, top_k=3, num_shared_experts=shared)
    layer.set_dtype(dtype)
    layer.e_score_correction_bias = mx.random.uniform(-1, 1, (11,))
    layer.merge(merged)
    x = mx.random.normal((rows, 32)).astype(dtype)
    y = layer(x)
    assert y.dtype == dtype and y.shape == x.shape
    tolerance = LAYER_HALF.get(str(dtype).rpartition(".")[2], FLOAT32)
    assert difference(y.astype(mx.float32), expert_oracle(layer, x)) < tolerance


@pytest.mark.parametrize("packing", [None, {"bits": 4, "group_size": 32}, {"bits": 8}])
@pytest.mark.parametrize("shape", [(1, 40, 64), (2, 3, 64), (3, 30, 64)])
def test_merged_experts_are_the_experts(packing, shape):
    """Few tokens and many, one row and several, packed and not."""
    mx.random.seed(1)
    layer = MoE(64, 64, 7, top_k=3)
    if packing is not None:
        nn.quantize(layer.switch_mlp, **packing)
    x = mx.random.normal(shape)
    expected = layer(x)
    layer.merge()
    assert difference(layer(x), expected) < FLOAT32


def test_many_tokens_take_the_merged_weights_as_they_lie(monkeypatch):
    """On Metal a product of sorted rows copies weights that are strided views, all experts'."""
    layer = MoE(32, 32, 7, top_k=3)
    layer.merge()
    whole = layer.switch_mlp._bundle.groups[0].whole["weight"]
    seen = []
    product = mx.gather_mm
    monkeypatch.setattr(mx, "gather_mm", lambda x, w, **k: seen.append(w) or product(x, w, **k))
    mx.eval(layer(mx.random.normal((40, 32))))
    assert [w.shape[-1] for w in seen] == [whole.shape[1], 32]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("cuda", [False, True])
def test_experts_past_2_gib_are_not_merged_on_cuda(monkeypatch, cuda, dtype):
    """The 48B's sizes: MLX's CUDA product of sorted rows reads elsewhere past 2 GiB of experts."""
    monkeypatch.setattr(merged, "_on_cuda", lambda: cuda)
    layers = [SwitchLinear(4, 4, 256, bias=False) for _ in range(2)]
    for layer in layers:
        layer.weight = mx.zeros((256, 1024, 2304), dtype=dtype)  # never evaluated
    one = layers[:1]
    assert merged.in_reach(one) == (not cuda or dtype == mx.bfloat16)  # 1.2 GB in bfloat16
    assert merged.in_reach(layers) == (not cuda)
    assert merged.in_reach([LoRASwitchLinear.from_base(one[0])]) == merged.in_reach(one)
    # 4 GiB of rows: 116,509 tokens, 8 experts each.
    wide = [8 * 116_508, 8 * 116_509]
    assert [merged.in_reach(one, rows) for rows in wide] == (
        [True, True] if not cuda else [dtype == mx.bfloat16, False]
    )
    packed = SwitchLinear(64, 64, 8, bias=False).to_quantized(bits=4, group_size=64)
    assert merged.in_reach([packed], 10**9)


@pytest.mark.parametrize("adapter", [False, True])
def test_experts_out_of_reach_are_not_sorted(monkeypatch, adapter):
    layer = MoE(64, 64, 7, top_k=3)
    x = mx.random.normal((1, 40, 64))
    if adapter:
        layer.switch_mlp.gate_proj = LoRASwitchLinear.from_base(layer.switch_mlp.gate_proj)
    layer.merge()
    expected = layer(x)
    monkeypatch.setattr(moe, "in_reach", lambda layers, rows=0: False)
    layer.merge()
    assert layer.switch_mlp._bundle is None
    product, seen = mx.gather_mm, []
    monkeypatch.setattr(mx, "gather_mm", lambda *a, **k: seen.append(k) or product(*a, **k))
    assert difference(layer(x), expected) < FLOAT32
    assert len(seen) >= 3 and not any(k.get("sorted_indices") for k in seen)


def test_merged_experts_ask_for_every_map_before_they_sort(monkeypatch):
    layer = MoE(64, 64, 7, top_k=3)
    layer.merge()
    asked = []
    monkeypatch.setattr(
        moe, "in_reach", lambda layers, rows=0: asked.append((layers, rows)) or True
    )
    mx.eval(layer(mx.random.normal((1, 40, 64))))
    maps = layer.switch_mlp
    assert asked == [((maps.gate_proj, maps.up_proj), 120), ([maps.down_proj], 120)]
