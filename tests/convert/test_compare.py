"""Weights read some rows at a time, and predictions compared some words at a time."""

import hashlib

import mlx.core as mx
import numpy as np
import pytest
from helpers.tiny_checkpoint import write_checkpoint
from tolerances import STOCK

from mlx_kda.convert import convert
from mlx_kda.convert.compare_errors import Divergence
from mlx_kda.convert.compare_weights import ModelWeights
from mlx_kda.convert.conversion_plan import plan_conversion
from mlx_kda.convert.recipe import ConvertOptions
from mlx_kda.weights.safetensors import in_pieces, read_bytes
from mlx_kda.weights.source import Reader, open_source

PATHS = ("model.embed_tokens", "lm_head", "model.layers.2.mlp.switch_mlp.down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A source with experts apart, and conversions with experts stacked, plain and packed."""
    root = tmp_path_factory.mktemp("rows")
    source = write_checkpoint(root / "source")
    convert(source, root / "plain", dtype="bfloat16")
    convert(source, root / "affine", q_bits=4, q_group_size=32)
    convert(source, root / "mxfp4", q_bits=4, q_mode="mxfp4")
    return root


@pytest.mark.parametrize("at_a_time", [None, 1, 3])
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("name", ["source", "plain", "affine", "mxfp4"])
def test_rows_are_those_of_the_whole_weight(folders, name, dequantize, at_a_time):
    plan = plan_conversion(open_source(folders / name), ConvertOptions(dequantize=dequantize))
    rows = ModelWeights(plan, hashed=True)
    with Reader(plan.source, ()) as rows.reader:
        whole = dict(rows.of_steps(plan.mapping.steps))
        for path in PATHS:
            blocks = list(rows.blocks(path, at_a_time))
            weight = whole[f"{path}.weight"]
            assert blocks[0][0] == 0 and blocks[-1][1] == weight.shape[0]
            parts = [rows.rows(path, start, stop) for start, stop in blocks]
            assert max(part.shape[0] for part in parts) <= (at_a_time or weight.shape[0])
            assert mx.array_equal(mx.concatenate(parts).astype(weight.dtype), weight)
    for stored in rows.digests:
        data = read_bytes(plan.source.tensors[stored])
        assert rows.digests[stored] == hashlib.sha256(data).hexdigest()
    assert "model.embed_tokens.weight" in rows.digests


def test_rows_out_of_order_have_no_digest(folders):
    plan = plan_conversion(open_source(folders / "affine"), ConvertOptions())
    with pytest.raises(RuntimeError, match="order"):
        ModelWeights(plan, hashed=True).rows(PATHS[0], 5, 7)
    assert ModelWeights(plan, hashed=False).rows(PATHS[0], 5, 7).shape == (2, 64)


def test_pieces_of_a_stored_tensor_cover_it(folders):
    for stored in open_source(folders / "plain").tensors.values():
        pieces = list(in_pieces(stored, 1000))
        assert b"".join(read_bytes(p).tobytes() for p in pieces) == read_bytes(stored).tobytes()
        row = stored.nbytes // stored.shape[0]
        assert max(p.nbytes for p in pieces) <= max(1000, row)


@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize("width", [1, 7, 500])
def test_divergence_in_blocks_is_that_of_the_definition(width, spread):
    """The largest logit may come in any block: here it also grows from block to block."""
    rng = np.random.default_rng(width)
    logits = rng.standard_normal((3, 11, 103)) * spread + np.linspace(0, 2 * spread, 103)
    logits[1] = logits[0] + rng.standard_normal((11, 103)) * 0.5
    logits[2] = logits[0] + 5.0  # the same distribution
    logits = logits.astype(np.float32)
    found = Divergence(11, 2)
    for start in range(0, 103, width):
        found.add([mx.array(x[:, start : start + width]) for x in logits])
    wide = logits.astype(np.float64)
    logp = wide - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logp -= wide.max(-1, keepdims=True)
    kl = (np.exp(logp[0]) * (logp[0] - logp[1])).sum(-1)
    (mean, largest, same), (none, _, every) = found.found()
    assert mean == pytest.approx(kl.mean(), rel=100 * STOCK)
    assert largest == pytest.approx(kl.max(), rel=100 * STOCK)
    assert same == (wide[0].argmax(-1) == wide[1].argmax(-1)).mean()
    assert none < 1e-4 and every == 1
