"""Quantised checkpoints as sources: by compressed-tensors, or by MLX and dequantised again."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers.checkpoints import edit_json, read_all, same_bits, stock_logits
from helpers.compressed import pack, settings_of, write_compressed
from helpers.paths import TESTS
from helpers.tiny_checkpoint import weights, write_checkpoint, write_weights
from tolerances import STOCK

from mlx_kda.convert import convert, inspect, plan, verify
from mlx_kda.errors import CheckpointError, UserError
from mlx_kda.models import load_model
from mlx_kda.weights.safetensors import Spec
from mlx_kda.weights.stored_formats import (
    PackedWeight,
    dequantize,
    mlx_part,
    packed_weights,
    unpack,
)

DATA = mx.load(str(TESTS / "data" / "compressed_tensors.safetensors"))
KINDS = sorted({name.partition(".")[0] for name in DATA})
TOKENS = mx.array([[1, 5, 9, 200, 7, 3, 3, 250, 42]])


def theirs(kind: str) -> tuple[PackedWeight, dict[str, mx.array]]:
    """One weight of the file that compressed-tensors made, as it is read here."""
    parts = {f"x.{n.partition('.')[2]}": a for n, a in DATA.items() if n.startswith(f"{kind}.")}
    bits = int(kind[3]) if kind.startswith("int") else 4
    settings = {"num_bits": bits, "symmetric": "asym" not in kind}
    settings["group_size"] = None if "channel" in kind else 32
    form = "mxfp4-pack-quantized" if kind == "mxfp4" else "pack-quantized"
    scheme = {"targets": ["Linear"], "weights": settings}
    entry = {"format": form, "config_groups": {"group_0": scheme}}
    specs = {name: Spec(array.shape, array.dtype) for name, array in parts.items()}
    (layout,) = packed_weights({"quantization_config": entry}, specs)
    return layout, parts


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_compressed_tensors_makes(kind):
    """Every format, bit for bit, against the package that wrote it."""
    layout, parts = theirs(kind)
    plain = dequantize(layout, parts.__getitem__, mx.bfloat16)
    assert same_bits(plain, parts["x.decompressed"])


@pytest.mark.parametrize("kind", KINDS)
def test_what_mlx_has_is_taken_over_without_rounding(kind):
    """``weight_packed`` keeps its bytes, and MLX makes the same weights of them."""
    layout, parts = theirs(kind)
    # one scale for a row of 64 is a group of 64
    ours = {"mxfp4", "int8-channel", *(f"int{bits}-g32" for bits in (2, 3, 4, 6, 8))}
    assert layout.is_mlx == (kind in ours)
    if not layout.is_mlx:
        return
    mode = "mxfp4" if kind == "mxfp4" else "affine"
    names = ("weight", "scales") if kind == "mxfp4" else ("weight", "scales", "biases")
    ours = [mlx_part(layout, part, parts.__getitem__) for part in names]
    assert np.array(ours[0]).tobytes() == np.array(parts["x.weight_packed"]).tobytes()
    form = {"bits": layout.bits, "group_size": layout.group_size, "mode": mode}
    back = mx.dequantize(
        *(a if a.dtype in (mx.uint8, mx.uint32) else a.astype(mx.float32) for a in ours), **form
    )
    assert mx.array_equal(back.astype(mx.bfloat16), parts["x.decompressed"]).item()


@pytest.mark.parametrize("bits", range(2, 9))
def test_unpack_every_width(bits):
    values = np.random.default_rng(bits).integers(0, 2**bits, (3, 45))
    got = unpack(mx.array(pack(values, bits)), bits, 45)
    assert (np.array(got) == values - 2 ** (bits - 1)).all()


def test_each_weight_has_the_scheme_whose_targets_name_it():
    """By name, by pattern, by the end of a name; a class of modules is for the rest."""
    forms = {"lm_head": 8, "re:.*experts.*": 2, "o_proj": 6, "Linear": 4}
    groups = {
        target: {"targets": [target], "weights": {"num_bits": bits, "group_size": 32}}
        for target, bits in forms.items()
    }
    entry = {"format": "pack-quantized", "config_groups": groups}
    wanted = {"lm_head": 8, "a.experts.3.w1": 2, "a.o_proj": 6, "a.q_proj": 4}
    specs = {}
    for path, bits in wanted.items():
        specs[f"{path}.weight_packed"] = Spec((8, 2 * bits), mx.int32)
        specs[f"{path}.weight_scale"] = Spec((8, 2), mx.bfloat16)
    found = packed_weights({"quantization_config": entry}, specs)
    assert {one.path: one.bits for one in found} == wanted
    del groups["Linear"]
    with pytest.raises(CheckpointError, match=r"a\.q_proj"):
        packed_weights({"quantization_config": entry}, specs)


# --- whole checkpoints


def parts_of(tensors: dict[str, mx.array], path: str) -> list[mx.array]:
    """Weight, scales and, if there are any, biases of a quantised weight."""
    names = (f"{path}.{part}" for part in ("weight", "scales", "biases"))
    return [tensors[name] for name in names if name in tensors]


@pytest.mark.parametrize(
    ("bits", "kind"), [(4, "pack-quantized"), (8, "pack-quantized"), (4, "mxfp4-pack-quantized")]
)
def test_a_quantised_checkpoint_is_taken_over(tmp_path, bits, kind):
    """Experts, MLA and all the rest: the same weights, in a folder that stock mlx-lm loads."""
    plain = write_compressed(tmp_path / "source", bits, kind=kind)
    report = convert(tmp_path / "source", tmp_path / "out")
    assert "taken over unchanged" in report.notes[0]
    mode = "mxfp4" if kind.startswith("mxfp4") else "affine"
    form = {"bits": bits, "group_size": 32, "mode": mode}
    assert settings_of(tmp_path / "out")["quantization"] == form
    result = read_all(tmp_path / "out")
    for name in ("layers.1.self_attn.q_proj", "layers.2.mlp.switch_mlp.down_proj"):
        parts = parts_of(result, f"model.{name}")
        back = mx.dequantize(*parts, **form, dtype=mx.float32)
        hub = f"model.{name}.weight"
        if "switch_mlp" in name:
            experts = "model.layers.2.block_sparse_moe.experts"
            wanted = mx.stack([plain[f"{experts}.{i}.w2.weight"] for i in range(8)])
        else:
            wanted = plain[hub]
        assert mx.abs(back - wanted).max().item() <= 1e-6
    write_weights(write_checkpoint(tmp_path / "plain"), plain)
    truth = stock_logits(tmp_path / "plain", TOKENS)
    for logits in (stock_logits(tmp_path / "out", TOKENS), load_model(tmp_path / "out")(TOKENS)):
        assert mx.abs(logits - truth).max().item() <= 10 * STOCK * mx.abs(truth).max().item()
    assert verify(tmp_path / "out", tmp_path / "source").ok


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"bits": 4, "symmetric": False}, "pack-quantized"),
        ({"bits": 3, "symmetric": False, "group": 64, "only": "up_proj"}, "pack-quantized"),
        ({"bits": 7}, "pack-quantized"),
        ({"bits": 4, "only": "experts.1."}, "pack-quantized"),
    ],
)
def test_what_mlx_does_not_have_is_dequantised(tmp_path, options, kind):
    plain = write_compressed(tmp_path / "source", kind=kind, **options)
    write_weights(write_checkpoint(tmp_path / "plain"), plain)
    convert(tmp_path / "plain", tmp_path / "wanted")
    report = convert(tmp_path / "source", tmp_path / "out")
    assert "dequantised" in report.notes[-1] and report.quantization is None
    result, wanted = read_all(tmp_path / "out"), read_all(tmp_path / "wanted")
    assert result.keys() == wanted.keys()
    for name, array in wanted.items():
        assert mx.abs(result[name] - array).max().item() <= 1e-6, name


def test_dequantize_and_requantise(tmp_path):
    """`--dequantize` gives plain weights, and with a recipe rounds a second time; never unasked."""
    plain = write_compressed(tmp_path / "source", 8)
    convert(tmp_path / "source", tmp_path / "plain", dequantize=True)
    assert settings_of(tmp_path / "plain").get("quantization") is None
    name = "model.layers.0.self_attn.q_proj.weight"
    assert mx.abs(read_all(tmp_path / "plain")[name] - plain[name]).max().item() <= 1e-6
    with pytest.raises(UserError, match="--dequantize"):
        convert(tmp_path / "source", tmp_path / "four", q_bits=4)
    convert(tmp_path / "source", tmp_path / "four", q_bits=4, q_group_size=32, dequantize=True)
    wanted = mx.quantize(plain[name], 32, 4)[0]
    assert (read_all(tmp_path / "four")[name] == wanted).mean().item() > 0.99
    assert verify(tmp_path / "four", tmp_path / "source").ok


@pytest.mark.parametrize(
    ("mode", "bits", "group"),
    [("affine", 4, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)],
)
def test_what_mlx_quantised_is_dequantised(tmp_path, mode, bits, group):
    source = write_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "packed", q_mode=mode, q_bits=bits, q_group_size=group)
    convert(tmp_path / "packed", tmp_path / "plain", dequantize=True)
    packed, plain = read_all(tmp_path / "packed"), read_all(tmp_path / "plain")
    settings = settings_of(tmp_path / "packed")["quantization"]
    assert not [name for name in plain if name.endswith((".scales", ".biases"))]
    default = {"bits": bits, "group_size": group, "mode": mode}
    for name, array in plain.items():
        path = name.removesuffix(".weight")
        if f"{path}.scales" not in packed:
            assert same_bits(array, packed[name])
            continue
        form = settings.get(path, default)
        whole = mx.dequantize(*parts_of(packed, path), **form, dtype=mx.float32)
        assert same_bits(array, whole)
    assert "quantization" not in settings_of(tmp_path / "plain")
    truth = load_model(tmp_path / "packed")(TOKENS)
    assert mx.abs(load_model(tmp_path / "plain")(TOKENS) - truth).max().item() <= 1e-3


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_a_quantised_kv_b_proj_is_split_and_requantised(tmp_path, mode):
    """Checkpoints of late 2025 hold it under the config's default settings."""
    source = write_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "old", q_bits=4, q_group_size=32, q_mode=mode)
    tensors = read_all(tmp_path / "old")
    tensors = {k: v for k, v in tensors.items() if not re.search("embed_q|unembed_out", k)}
    base = "model.layers.3.self_attn.kv_b_proj"
    parts = mx.quantize(weights()[f"{base}.weight"], 32, 4, mode=mode)
    for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
        tensors[f"{base}.{part}"] = array
    write_weights(tmp_path / "old", tensors)
    convert(tmp_path / "old", tmp_path / "new", dequantize=True, q_bits=8, q_group_size=32)
    result = read_all(tmp_path / "new")
    name = "model.layers.3.self_attn.unembed_out"
    back = mx.dequantize(*parts_of(result, name), 32, 8)
    whole = mx.dequantize(*parts, group_size=32, bits=4, mode=mode, dtype=mx.float32)
    wanted = whole.reshape(2, 64, 32)[:, 32:]
    assert mx.abs(back - wanted).max().item() <= 1e-2 * mx.abs(wanted).max().item()
    assert stock_logits(tmp_path / "new", TOKENS).shape == (1, 9, 288)


# --- what is refused


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        convert(folder, folder.parent / "out")
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": "float-quantized"}, "float-quantized"),
        ({"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({"format": None}, "None"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"config_groups": None}, "config_groups"),
        ({"config_groups": {"a": 3}}, "config_groups"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "gptq"}, "gptq"),
    ],
)
def test_unsupported_formats_are_named(tmp_path, change, word):
    write_compressed(tmp_path / "source")
    entry = settings_of(tmp_path / "source")["quantization_config"] | change
    edit_json(tmp_path / "source" / "config.json", quantization_config=entry)
    refused(tmp_path / "source", word)


@pytest.mark.parametrize(
    ("part", "change", "word"),
    [
        ("weight_packed", lambda a: a[:, :-1], "layout"),
        ("weight_packed", lambda a: a.astype(mx.int64), "layout"),
        ("weight_scale", lambda a: a[:-1], "layout"),
        ("weight_scale", None, "no scale per row"),
        ("weight_shape", lambda a: a + 1, "weight_shape is"),
    ],
)
def test_damaged_parts_are_named(tmp_path, part, change, word):
    write_compressed(tmp_path / "source")
    tensors = read_all(tmp_path / "source")
    path = "model.layers.2.self_attn.k_proj"
    array = tensors.pop(f"{path}.{part}")
    if change:
        tensors[f"{path}.{part}"] = change(array)
    write_weights(tmp_path / "source", tensors)
    refused(tmp_path / "source", path, word)


def test_a_plan_and_info_of_a_quantised_source(tmp_path):
    write_compressed(tmp_path / "source")
    found = plan(tmp_path / "source", tmp_path / "out", q_bits=4, q_group_size=32, dequantize=True)
    assert found.problems == [] and "dequantised" in found.notes[0]
    assert plan(tmp_path / "source", tmp_path / "out").bytes_out < found.bytes_in * 1.2
    assert "compressed-tensors" in inspect(tmp_path / "source").problem
