"""dtypes and quantisation: what is packed, what is spared, and that stock mlx-lm agrees."""

import json
import re

import mlx.core as mx
import pytest
from helpers.checkpoints import read_all, same_bits, stock_logits
from helpers.paths import GOLDENS
from helpers.tiny_checkpoint import weights, write_checkpoint, write_weights
from tolerances import QUANTISED, STOCK

from mlx_kda.convert import convert
from mlx_kda.convert.quantise import is_finite
from mlx_kda.errors import UserError
from mlx_kda.models import load_model

TOKENS = mx.array([[1, 5, 9, 200, 7, 3, 3, 250, 42]])
MODES = [
    *(("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)),
    ("affine", 4, 64),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]
SPARED = re.compile(
    r"A_log$|dt_bias$|e_score_correction_bias$|norm\.weight$|_conv\.conv\.weight$"
    r"|\.(b|f_a|f_b|g_a|g_b)_proj\.weight$"
)


@pytest.fixture(scope="module")
def plain(source, tmp_path_factory):
    """The unquantised tensors in MLX's names."""
    out = tmp_path_factory.mktemp("plain") / "out"
    convert(source, out)
    return read_all(out)


def same_logits_as_stock(folder) -> None:
    """Stock mlx-lm and this package load a folder alike."""
    truth, ours = stock_logits(folder, TOKENS), load_model(folder)(TOKENS)
    assert mx.abs(ours - truth).max().item() <= STOCK * mx.abs(truth).max().item()


def packing(config: dict, path: str) -> dict:
    """What config.json says of one weight, as mlx-lm reads it."""
    quantization = config["quantization"]
    default = {key: quantization[key] for key in ("bits", "group_size", "mode")}
    return quantization.get(path, default)


@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
def test_each_mode_by_the_default_recipe(source, plain, mode, bits, group, tmp_path):
    """The gate path stays, the router has 8 bits, the rest is what mx.quantize makes."""
    out = tmp_path / "out"
    report = convert(source, out, q_bits=bits, q_group_size=group, q_mode=mode)
    result = read_all(out)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"] == report.quantization
    for name, weight in plain.items():
        path = name.removesuffix(".weight")
        if SPARED.search(name) or weight.shape[-1] % group:
            assert same_bits(result[name], weight), name
            assert f"{path}.scales" not in result
            continue
        how = packing(config, path)
        wanted = {"bits": bits, "group_size": group, "mode": mode}
        if path.endswith("mlp.gate") and (mode != "affine" or bits < 8):
            wanted = {"bits": 8, "group_size": 64, "mode": "affine"}
        assert how == wanted
        parts = mx.quantize(weight, how["group_size"], how["bits"], mode=how["mode"])
        names = [f"{path}.weight", f"{path}.scales", f"{path}.biases"][: len(parts)]
        assert all(same_bits(result[n], part) for n, part in zip(names, parts, strict=True))
        restored = mx.dequantize(*parts, **how)
        error = mx.abs(restored - weight).max() / mx.abs(weight).max()
        assert error.item() <= QUANTISED[how["mode"], how["bits"]]
    left_over = {n for n in result if not n.endswith((".scales", ".biases"))} - set(plain)
    assert not left_over
    same_logits_as_stock(out)


def test_weights_that_are_not_quantised_are_named_in_the_report(source, tmp_path):
    """One line for all layers."""
    report = convert(source, tmp_path / "out", q_bits=4, q_group_size=32)
    layer = "model.layers.*.self_attn"
    for part in ("b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"):
        assert report.kept[f"{layer}.{part}"] == "gate path"
    assert report.kept[f"{layer}.q_conv.conv"] == "convolution window"
    assert len(report.kept) == 8
    assert 4 < report.bits_per_weight < 16
    assert report.bits_per_weight == 8 * report.bytes_out / report.parameters
    kept = json.loads((tmp_path / "out" / "conversion.json").read_text())["kept"]
    assert kept == report.kept


def test_a_width_that_no_group_divides_is_left_and_said(source, tmp_path):
    """32 wide in groups of 64: mx.quantize would raise; the weight stays as it is."""
    report = convert(source, tmp_path / "out", q_bits=4, q_group_size=64)
    result = read_all(tmp_path / "out")
    for path in ("mlp.switch_mlp.down_proj", "self_attn.embed_q", "self_attn.unembed_out"):
        assert report.kept[f"model.layers.*.{path}"] == "width 32 is not a multiple of group 64"
        assert f"model.layers.3.{path}.scales" not in result
    assert "model.layers.3.mlp.switch_mlp.up_proj.scales" in result


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"q_bits": 7}, "7 bits"),
        ({"q_bits": 0}, "0 bits"),
        ({"q_bits": 4, "q_group_size": 48}, "group size 48"),
        ({"q_bits": 4, "q_group_size": 0}, "group size 0"),
        ({"q_mode": "mxfp4", "q_bits": 8}, "8 bits"),
        ({"q_mode": "nvfp4", "q_group_size": 32}, "group size 32"),
        ({"q_mode": "gguf"}, "gguf"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "float64"}, "float64"),
        ({"shard_bytes": 0}, "shard"),
    ],
)
def test_options_that_mlx_does_not_have_are_refused_before_anything_is_read(
    options, word, tmp_path
):
    with pytest.raises(UserError, match=word):
        convert(tmp_path / "nowhere", tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


# --- dtypes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", [None, 4])
def test_gate_parameters_stay_float32_and_all_else_follows(source, dtype, bits, tmp_path):
    """A_log, dt_bias and the router's bias are the source's bits in any dtype."""
    convert(source, tmp_path / "out", dtype=dtype, q_bits=bits, q_group_size=bits and 32)
    given, result = weights(), read_all(tmp_path / "out")
    checked = 0
    for name, array in result.items():
        if name.endswith(("A_log", "dt_bias", "e_score_correction_bias")):
            hub = name.replace("mlp.e_score", "block_sparse_moe.gate.e_score")
            assert same_bits(array, given[hub]), name
            checked += 1
        elif array.dtype != mx.uint32:
            assert str(array.dtype) == f"mlx.core.{dtype}", name
    assert checked == 3 + 3 + 3
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == dtype


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_one_float32_router_does_not_widen_the_model(dtype, tmp_path):
    """A router stored in float32 beside 16-bit weights is cast like them, and is reported."""
    router = "model.layers.2.block_sparse_moe.gate.weight"
    tensors = {
        name: tensor if name == router else tensor.astype(dtype)
        for name, tensor in weights().items()
    }
    source = write_checkpoint(tmp_path / "source", tensors=tensors)
    report = convert(source, tmp_path / "out")
    assert list(report.cast) == ["model.layers.*.mlp.gate.weight"]
    others = {
        a.dtype
        for n, a in read_all(tmp_path / "out").items()
        if not n.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
    }
    assert others == {dtype}


def test_the_router_bias_arrives_bit_by_bit(tmp_path):
    """Biases in a range where bfloat16 merges them; a zero's sign and a denormal too."""
    key = mx.random.key(7)
    bias = mx.random.uniform(6.817, 7.063, (8,), key=key)
    assert len(set(bias.astype(mx.bfloat16).tolist())) < 8
    bias = mx.concatenate([bias[:6], mx.array([-0.0, 1e-42])])
    name = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
    source = write_checkpoint(tmp_path / "source", tensors=weights() | {name: bias})
    for number, options in enumerate(
        ({}, {"dtype": "bfloat16"}, {"q_bits": 2, "q_group_size": 32})
    ):
        out = tmp_path / f"out{number}"
        convert(source, out, **options)
        assert same_bits(read_all(out)["model.layers.1.mlp.e_score_correction_bias"], bias)


def test_bfloat16_sources_are_read_bit_by_bit(tmp_path):
    """Every bit pattern of bfloat16 that is a number survives reading, stacking and writing."""
    bits = mx.arange(1 << 16).astype(mx.uint16)
    finite = mx.isfinite(bits.view(mx.bfloat16))
    table = mx.where(finite, bits, mx.zeros_like(bits)).view(mx.bfloat16)
    tensors = {name: tensor.astype(mx.bfloat16) for name, tensor in weights().items()}
    rows = {"model.embed_tokens.weight": table[: 288 * 64], "lm_head.weight": table[-288 * 64 :]}
    tensors |= {name: values.reshape(288, 64) for name, values in rows.items()}
    source = write_checkpoint(tmp_path / "source", tensors=tensors)
    convert(source, tmp_path / "out", shard_bytes=50_000)
    result = read_all(tmp_path / "out")
    for name in rows:
        assert same_bits(result[name], tensors[name])


def test_values_beyond_float16_are_refused_by_name(tmp_path):
    """A cast that would make an infinity is no conversion."""
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors = weights()
    tensors[name] = tensors[name] * 0 + 7e4
    source = write_checkpoint(tmp_path / "source", tensors=tensors)
    with pytest.raises(UserError, match=rf"{name} .*range of .*float16"):
        convert(source, tmp_path / "out", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    convert(source, tmp_path / "out", dtype="bfloat16")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.block_sparse_moe.experts.3.w1.weight",
        "model.layers.0.self_attn.dt_bias",
        "model.norm.weight",
    ],
)
def test_weights_that_are_no_numbers_are_refused_by_name(name, value, tmp_path):
    tensors = weights()
    tensors[name] = mx.concatenate([tensors[name].flatten()[:-1], mx.array([value])]).reshape(
        tensors[name].shape
    )
    source = write_checkpoint(tmp_path / "source", tensors=tensors)
    with pytest.raises(UserError, match="NaN or infinite"):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- sources that MLX wrote


@pytest.fixture(scope="module")
def stock_folder(source, tmp_path_factory):
    """The checkpoint as stock mlx-lm converts it to 4 bits."""
    from mlx_lm.utils import load_model as stock_load
    from mlx_lm.utils import quantize_model, save_config, save_model

    out = tmp_path_factory.mktemp("stock") / "out"
    model, config = stock_load(source)
    model, config = quantize_model(model, config, 32, 4)
    save_model(out, model)
    save_config(config, out / "config.json")
    return out


def test_what_stock_mlx_lm_quantised_is_taken_over(stock_folder, tmp_path):
    """Packed weights pass through unchanged, and both packages compute from them alike."""
    report = convert(stock_folder, tmp_path / "out")
    given, result = read_all(stock_folder), read_all(tmp_path / "out")
    assert given.keys() == result.keys()
    assert all(same_bits(given[name], result[name]) for name in given)
    assert report.quantization["bits"] == 4
    assert report.quantization["model.layers.1.mlp.gate"]["bits"] == 8
    truth = stock_logits(stock_folder, TOKENS)
    assert mx.array_equal(stock_logits(tmp_path / "out", TOKENS), truth).item()
    same_logits_as_stock(tmp_path / "out")


def test_quantising_what_is_quantised_is_refused(stock_folder, tmp_path):
    with pytest.raises(UserError, match="quantised already"):
        convert(stock_folder, tmp_path / "out", q_bits=8)


@pytest.mark.parametrize(
    ("mode", "bits", "group"), [("affine", 4, 32), ("mxfp4", 4, 32), ("nvfp4", 4, 16)]
)
def test_a_quantised_kv_b_proj_is_split(source, mode, bits, group, tmp_path):
    """mlx-lm of late 2025 wrote kv_b_proj packed, with biases or without."""
    old = tmp_path / "old"
    convert(source, old, q_bits=bits, q_group_size=group, q_mode=mode)
    tensors = {k: v for k, v in read_all(old).items() if not re.search("embed_q|unembed_out", k)}
    base = "model.layers.3.self_attn.kv_b_proj"
    whole = weights()[f"{base}.weight"]
    parts = mx.quantize(whole, group, bits, mode=mode)
    for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
        tensors[f"{base}.{part}"] = array
    for path in old.glob("model*"):
        path.unlink()
    write_weights(old, tensors)
    convert(old, tmp_path / "new")
    result = read_all(tmp_path / "new")
    restored = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode)
    split = restored.reshape(2, 64, 32)
    keys = result["model.layers.3.self_attn.embed_q.weight"]
    values = result["model.layers.3.self_attn.unembed_out.weight"]
    assert mx.array_equal(keys.astype(mx.float32), split[:, :32].swapaxes(1, 2)).item()
    assert mx.array_equal(values.astype(mx.float32), split[:, 32:]).item()
    same_logits_as_stock(tmp_path / "new")
    truth, ours = load_model(tmp_path / "new")(TOKENS), load_model(old)(TOKENS)
    assert mx.abs(ours - truth).max().item() <= STOCK * mx.abs(truth).max().item()


def test_packed_shapes_that_fit_no_mode_are_refused(stock_folder, tmp_path):
    tensors = read_all(stock_folder)
    name = "model.layers.0.self_attn.q_proj"
    for part in ("weight", "scales", "biases"):
        broken = dict(tensors)
        broken[f"{name}.{part}"] = broken[f"{name}.{part}"][:, :-1]
        folder = tmp_path / part
        folder.mkdir()
        (folder / "config.json").write_text((stock_folder / "config.json").read_text())
        write_weights(folder, broken)
        with pytest.raises(UserError, match=name):
            convert(folder, tmp_path / "out")


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_is_finite_sees_every_infinity_and_nan(dtype):
    """Read off the bits: around the infinities of both signs, and NaN beside negative numbers."""
    unsigned, infinity = {
        mx.float32: (mx.uint32, 0x7F800000),
        mx.float16: (mx.uint16, 0x7C00),
        mx.bfloat16: (mx.uint16, 0x7F80),
    }[dtype]
    top = 1 << (8 * dtype.size - 1)
    for bits in (0, 1, infinity - 1, infinity, infinity + 1, top - 1):
        for sign in (0, top):
            value = mx.array([bits + sign], dtype=unsigned).view(dtype)
            for others in (mx.array([-1.0, 2.0]), mx.array([-3.0])):
                array = mx.concatenate([others.astype(dtype), value])
                assert is_finite(array) == (bits < infinity)
                assert is_finite(array[None]) == (bits < infinity)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_activations_of_every_layer_stay_16_bits(dtype, tmp_path, monkeypatch):
    """Gate parameters are float32, yet no layer of stock mlx-lm or of ours widens.

    On the dense golden: MLX's CPU has no 16-bit experts.
    """
    from mlx_lm.utils import load_model as stock_load

    convert(GOLDENS / "native-dense", tmp_path / "out", dtype=dtype)
    for model in (stock_load(tmp_path / "out")[0], load_model(tmp_path / "out")):
        seen = []
        kind = type(model.layers[0])
        original = kind.__call__

        def watch(self, *args, _original=original, _seen=seen, **kwargs):
            result = _original(self, *args, **kwargs)
            _seen.append(str(result.dtype))
            return result

        monkeypatch.setattr(kind, "__call__", watch)
        logits = model(TOKENS % 128)
        assert seen == [f"mlx.core.{dtype}"] * len(model.layers)
        assert str(logits.dtype) == f"mlx.core.{dtype}"
