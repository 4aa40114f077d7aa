"""`verify`: what is right passes, and every kind of damage is found and named."""

import json
import math
import shutil

import mlx.core as mx
import numpy as np
import pytest
from helpers.checkpoints import edit_json, read_all
from helpers.tiny_checkpoint import weights, write_checkpoint, write_weights
from helpers.trained import EXAMPLES
from tolerances import STOCK

from mlx_kda.cli.main import main
from mlx_kda.convert import checks, convert, verify
from mlx_kda.convert.checks import SAMPLE
from mlx_kda.convert.compare import compare
from mlx_kda.convert.compare_errors import weight_bound
from mlx_kda.convert.conversion_plan import plan_conversion
from mlx_kda.convert.recipe import ConvertOptions
from mlx_kda.convert.verification import ROW, sample_tokens
from mlx_kda.errors import UserError
from mlx_kda.models import load_model
from mlx_kda.tokenizer import load_tokenizer
from mlx_kda.weights.quantization import Quantization
from mlx_kda.weights.source import open_source

FLA = EXAMPLES / "tiny-fla-kda"
RECIPES = [
    {},
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"q_bits": 8, "q_group_size": 32},
    {"q_bits": 4, "q_group_size": 32},
    {"q_bits": 2, "q_group_size": 32},
    {"q_bits": 4, "q_mode": "mxfp4"},
    {"q_bits": 4, "q_mode": "nvfp4"},
    {"q_bits": 8, "q_mode": "mxfp8"},
    {"q_rules": ["mlp.switch_mlp.*=3,32", "self_attn.o_proj=8,64"]},
    {"target_bpw": 7},
]


@pytest.fixture(scope="module")
def good(source, tmp_path_factory):
    """The source in 4 bits, in several files."""
    out = tmp_path_factory.mktemp("verify") / "good"
    convert(source, out, q_bits=4, q_group_size=32, shard_bytes=100_000)
    return out


@pytest.fixture
def bad(good, tmp_path):
    """A copy to be damaged."""
    return shutil.copytree(good, tmp_path / "bad")


def failed(found) -> dict[str, str]:
    """What failed -> what was found."""
    return {check.what: check.found for check in found.checks if not check.ok}


def rewrite(folder, change) -> None:
    """Change the tensors of a folder, and make the report agree with its new files."""
    tensors = read_all(folder)
    change(tensors)
    for path in folder.glob("model*"):
        path.unlink()
    write_weights(folder, tensors)
    (folder / "conversion.json").unlink()


@pytest.mark.parametrize("options", RECIPES, ids=str)
def test_every_recipe_is_well(source, tmp_path, options):
    convert(source, tmp_path / "out", **options)
    found = verify(tmp_path / "out", source)
    assert failed(found) == {}
    families = found.comparison.families
    assert {"experts", "KDA gates", "MLA latents", "norms"} <= families.keys()
    assert sum(family.tensors for family in families.values()) == 89
    if not options:
        assert (found.comparison.kl, found.comparison.top1) == (0, 1)
        assert set(found.comparison.drift.values()) == {0}


def test_the_logits_are_those_of_the_models(source, good, tmp_path):
    """Streamed a layer at a time, KL and agreement are those of the two models loaded whole."""
    (tmp_path / "t.json").write_text(json.dumps([5, 77, 3, 3, 200, 41, 9, 250, 17, 5, 6, 7]))
    found = verify(good, source, tmp_path / "t.json", max_kl=math.inf).comparison
    ids = mx.array(json.loads((tmp_path / "t.json").read_text()))[None]
    logits = [np.array(load_model(folder)(ids)[0], dtype=np.float64) for folder in (source, good)]
    logs = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in logits]
    kl = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    assert found.tokens == 12
    assert abs(found.kl - kl.mean()) <= 100 * STOCK * kl.mean()
    assert abs(found.kl_max - kl.max()) <= 100 * STOCK * kl.max()
    assert found.top1 == (logits[0].argmax(-1) == logits[1].argmax(-1)).mean()
    assert 0 < kl.mean() < 10


def test_without_a_source_the_folder_alone_is_checked(good):
    found = verify(good)
    assert found.ok and found.comparison is None
    assert [c.what for c in found.checks] == [
        "checksums", "index", "config", "tensors", "dtypes", "quantisation", "tokenizer", "finite",
    ]  # fmt: skip


NAME = "model.layers.1.self_attn.o_proj.weight"
DT_BIAS, A_LOG = "model.layers.1.self_attn.dt_bias", "model.layers.0.self_attn.A_log"


def flip_bit(folder) -> None:
    victim = sorted(folder.glob("model-*"))[1]
    data = bytearray(victim.read_bytes())
    data[-5] ^= 4
    victim.write_bytes(data)


def index(change):
    """Change an index without touching a weight file; ``change`` gets the first file's name too."""

    def damage(folder) -> None:
        path = folder / "model.safetensors.index.json"
        content = json.loads(path.read_text())
        change(content, min(content["weight_map"].values()))
        path.write_text(json.dumps(content))

    return damage


def swap_ids(folder) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"] + 400, vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def unname_template(folder) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(folder / "tokenizer_config.json", chat_template=[{"name": "default"}])


# what is damaged -> (the check that fails, what it says, the damage)
DAMAGES = {
    "a bit": ("checksums", "-00002-of-", flip_bit),
    "index misses a tensor": (
        "index", f"not named: {NAME} in model-", index(lambda i, _: i["weight_map"].pop(NAME))),
    "index names one too many": (
        "index", "it says: ghost", index(lambda i, first: i["weight_map"].update(ghost=first))),
    "index names another file": (
        "index", f"it says: {NAME}", index(lambda i, first: i["weight_map"].update({NAME: first}))),
    "index has another size": (
        "index", "total_size is 7", index(lambda i, _: i["metadata"].update(total_size=7))),
    "index has no metadata": (
        "index", "total_size is None", index(lambda i, _: i.pop("metadata"))),
    "index has a list as metadata": (
        "index", "total_size is None", index(lambda i, _: i.update(metadata=[1]))),
    "index has no weight_map": (
        "index", "no weight_map", index(lambda i, _: i.pop("weight_map"))),
    "no index": (
        "index", "none, and", lambda f: (f / "model.safetensors.index.json").unlink()),
    # mlx-lm reads every model*.safetensors, whatever the index says
    "another weight file": (
        "index", "model-00099",
        lambda f: shutil.copy(min(f.glob("model-*")), f / "model-00099.safetensors")),
    "a tensor is missing": (
        "tensors", DT_BIAS, lambda f: rewrite(f, lambda tensors: tensors.pop(DT_BIAS))),
    # it loads anywhere and is wrong
    "A_log in 16 bits": (
        "dtypes", A_LOG,
        lambda f: rewrite(f, lambda t: t.update({A_LOG: t[A_LOG].astype(mx.bfloat16)}))),
    "config has other bits": (
        "quantisation", "others: ",
        lambda f: edit_json(
            f / "config.json", quantization={"bits": 8, "group_size": 32, "mode": "affine"})),
    "tokenizer.json": (
        "tokenizer", "does not load", lambda f: (f / "tokenizer.json").write_text("{")),
    "no tokenizer.json": ("tokenizer", "missing", lambda f: (f / "tokenizer.json").unlink()),
    "tokenizer_config.json": (
        "tokenizer", "does not load", lambda f: (f / "tokenizer_config.json").write_text("[]")),
    "ids of the vocabulary": ("tokenizer", "gives the id", swap_ids),
    "the end token": (
        "tokenizer", "ends at id 5000", lambda f: edit_json(f / "config.json", eos_token_id=5000)),
    # read where generation builds its tokenizer
    "templates without names": ("tokenizer", "chat_template is damaged", unname_template),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found(bad, kind):
    check, word, damage = DAMAGES[kind]
    damage(bad)
    assert word in failed(verify(bad))[check]


@pytest.mark.parametrize(
    "damage",
    [
        lambda report: "{",
        lambda report: json.dumps([1]),
        lambda report: json.dumps(report | {"files": [1]}),
        lambda report: json.dumps(report | {"files": {"x": 1}}),
        lambda report: json.dumps({k: v for k, v in report.items() if k != "tensors_out"}),
    ],
    ids=["cut short", "a list", "files are a list", "a file is a number", "a fact is missing"],
)
def test_a_damaged_report_is_found(bad, source, damage, capsys):
    report = json.loads((bad / "conversion.json").read_text())
    (bad / "conversion.json").write_text(damage(report))
    assert failed(verify(bad)) == {"checksums": "conversion.json is damaged"}
    for flag in ("--resume", "--overwrite"):  # nobody's output is replaced
        assert main(["convert", str(source), str(bad), flag]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert (bad / "config.json").is_file()


def test_a_missing_or_truncated_file_is_found(bad):
    victim = sorted(bad.glob("model-*"))[1]
    victim.write_bytes(victim.read_bytes()[:-9])
    found = failed(verify(bad))
    assert victim.name in found["checksums"] and "truncated" in found["tensors"]
    victim.unlink()
    found = failed(verify(bad))
    assert f"{victim.name} (missing)" in found["checksums"] and "missing" in found["tensors"]


def test_a_damaged_config_is_named_as_such(bad):
    edit_json(bad / "config.json", num_hidden_layers="four")
    assert list(failed(verify(bad))) == ["config"]
    (bad / "config.json").write_text("{")
    assert "damaged" in failed(verify(bad))["config"]


@pytest.mark.parametrize("way", ["decode", "stream"])
def test_a_tokenizer_that_loses_text_is_found(bad, monkeypatch, way):
    """Whole, as `decode` gives it, or in the pieces that generation shows."""
    if way == "decode":
        content = json.loads((bad / "tokenizer.json").read_text())
        content["decoder"] = {"type": "Replace", "pattern": {"String": "e"}, "content": ""}
        (bad / "tokenizer.json").write_text(json.dumps(content))
        (bad / "conversion.json").unlink()
    else:
        monkeypatch.setattr(checks.ByteDetokenizer, "finalize", checks.ByteDetokenizer.reset)
    assert failed(verify(bad)) == {"tokenizer": "the text comes back changed"}


@pytest.mark.parametrize("kind", ["tiktoken.model", "tokenizer.json", "tokenizer.model"])
def test_the_tokenizer_that_is_tried_is_the_one_that_generates(source, good, kind, tmp_path):
    """It is tried without transformers: ids, text and ends must be those of `load_tokenizer`."""
    folder = {"tiktoken.model": source, "tokenizer.json": good, "tokenizer.model": FLA}[kind]
    assert (folder / kind).is_file()
    ids, texts, ends = checks._try_tokenizer(open_source(folder))
    tokenizer = load_tokenizer(folder)
    assert ids == tokenizer.encode(SAMPLE, add_special_tokens=False)
    assert texts == [tokenizer.decode(ids)] * 2
    assert ends == sorted(tokenizer.eos_token_ids)

    # An end token that is a word of the vocabulary and no control token ends a reply as well.
    bare = shutil.copytree(folder, tmp_path / "bare")
    word = tokenizer.convert_ids_to_tokens(ids[0])
    edit_json(bare / "tokenizer_config.json", eos_token=word)
    ends = checks._try_tokenizer(open_source(bare))[2]
    assert ids[0] in ends and ends == sorted(load_tokenizer(bare).eos_token_ids)


def test_a_source_without_a_tokenizer_is_well(source, tmp_path):
    """What the conversion did not promise is not asked for."""
    bare = shutil.copytree(source, tmp_path / "bare")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (bare / name).unlink()
    convert(bare, tmp_path / "out")
    found = verify(tmp_path / "out")
    assert found.ok and ("tokenizer", "none") in [(c.what, c.found) for c in found.checks]


def test_a_folder_that_fails_is_not_compared(bad, source):
    sorted(bad.glob("model-*"))[1].unlink()
    edit_json(bad / "config.json", torch_dtype="float16")
    found = failed(verify(bad, source))
    assert "index" in found and "KL divergence" not in found


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_value_that_is_no_number_is_found(bad, value):
    name = "model.layers.2.mlp.switch_mlp.up_proj.scales"

    def change(tensors):
        flat = tensors[name].reshape(-1)
        tensors[name] = mx.concatenate([flat[:-1], mx.array([value])]).reshape(tensors[name].shape)

    rewrite(bad, change)
    assert failed(verify(bad)) == {"finite": f"1 are not: {name}"}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.switch_mlp.gate_proj",
        "model.layers.3.self_attn.embed_q",
        "model.layers.0.self_attn.b_proj",
        "model.norm",
    ],
)
def test_a_wrong_order_is_found_by_the_error_of_its_family(bad, source, name):
    """Experts, heads or rows in another order: every shape is right and every number is wrong."""

    def change(tensors):
        for part in ("weight", "scales", "biases"):
            if f"{name}.{part}" in tensors:
                tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"][::-1]

    rewrite(bad, change)
    found = failed(verify(bad, source, max_kl=math.inf, min_top1=0))
    assert len(found) == 1
    assert f"{name}.weight" in next(iter(found.values()))


def test_another_source_is_found(good, tmp_path):
    other = write_checkpoint(tmp_path / "other", seed=3)
    found = failed(verify(good, other))
    assert found["source"] == "another"
    assert {"error of experts", "error of norms", "error of KDA gates"} <= found.keys()


@pytest.mark.parametrize("kind", ["narrower", "fewer layers"])
def test_a_source_of_other_shapes_is_refused_in_one_line(good, tmp_path, capsys, kind):
    tensors = weights()
    if kind == "narrower":
        config, word = {"intermediate_size": 64}, "mlp.gate_proj.weight"
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.0.mlp.{part}.weight"
            tensors[name] = tensors[name][:, :64] if part == "down_proj" else tensors[name][:64]
    else:
        linear = {"kda_layers": [1, 2, 3], "full_attn_layers": [], "num_heads": 2}
        linear |= {"head_dim": 32, "short_conv_kernel_size": 4}
        config, word = {"num_hidden_layers": 3, "linear_attn_config": linear}, "num_hidden_layers"
        tensors = {name: t for name, t in tensors.items() if ".layers.3." not in name}
    other = write_checkpoint(tmp_path / "other", tensors=tensors, **config)
    assert main(["verify", str(good), "--source", str(other)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "another model" in err and word in err and err.count("\n") == 1


def test_progress_of_a_comparison_is_in_bytes(good, source):
    heard = []
    verify(good, source, progress=lambda done, total, name: heard.append((done, total, name)))
    compared = [one for one in heard if one[2].startswith("comparing")]
    plain = plan_conversion(open_source(source), ConvertOptions()).nbytes
    assert {total for _, total, _ in compared} == {plain}
    done = [done for done, _, _ in compared]
    assert done == sorted(done) and plain / 2 < done[-1] < plain


def test_bounds_of_the_user(good, source):
    assert verify(good, source, max_kl=100, min_top1=0).ok
    assert list(failed(verify(good, source, max_kl=1e-9, min_top1=0))) == ["KL divergence"]
    assert list(failed(verify(good, source, max_kl=100, min_top1=1))) == ["top-1 agreement"]


def test_a_source_that_is_quantised_is_compared_too(good, tmp_path):
    convert(good, tmp_path / "plain", dequantize=True)
    found = verify(tmp_path / "plain", good)
    assert failed(found) == {}
    assert found.comparison.kl < 1e-9


def test_tied_embeddings_are_the_head(tmp_path):
    tensors = {n: t for n, t in weights().items() if n != "lm_head.weight"}
    source = write_checkpoint(tmp_path / "tied", tensors=tensors, tie_word_embeddings=True)
    convert(source, tmp_path / "out")
    found = verify(tmp_path / "out", source)
    assert failed(found) == {} and (found.comparison.kl, found.comparison.top1) == (0, 1)


def test_memory_is_that_of_a_unit(good, source, monkeypatch):
    """No more than one layer's weights of each model are made at a time."""
    import mlx_kda.convert.compare as module

    seen, real = [], module._load
    monkeypatch.setattr(module, "_load", lambda m, w, unit: (seen.append(set(w)), real(m, w, unit)))
    plans = [plan_conversion(open_source(folder), ConvertOptions()) for folder in (source, good)]
    compare(*plans, mx.array([[1, 2, 3]]))
    assert len(seen) == 3 * (4 + 1)
    assert all(len({".".join(name.split(".")[:3]) for name in names}) == 1 for names in seen)


def test_bounds_by_packing():
    assert weight_bound(Quantization(4, 64), mx.uint32, mx.float32) < 0.25
    assert weight_bound(None, mx.float32, mx.float32) == 0
    assert 0 < weight_bound(None, mx.bfloat16, mx.float32) < 1e-2


# --- texts


def test_tokens_to_compare_on(good, tmp_path):
    built_in = sample_tokens(good, 288, None, 2048)
    assert built_in.shape[1] == ROW and built_in.max().item() < 288
    (tmp_path / "t.txt").write_text("the end")
    assert sample_tokens(good, 288, tmp_path / "t.txt", 2048).shape == (1, 5)
    assert sample_tokens(good, 288, tmp_path / "t.txt", 3).shape == (1, 3)
    (tmp_path / "t.json").write_text(json.dumps(list(range(200)) * 8))
    assert sample_tokens(good, 288, tmp_path / "t.json", 1030).shape == (2, ROW)


@pytest.mark.parametrize(
    ("name", "data", "word"),
    [
        ("a.txt", b"\xff\xfe", "UTF-8"),
        ("a.json", b"{", "JSON"),
        ("a.json", b"{}", "list"),
        ("a.json", b"[1, 900]", "outside 0 to 287"),
        ("a.json", b"[1, -1]", "outside 0 to 287"),
        ("a.json", b'["a", "b"]', "outside 0 to 287"),
        ("a.json", b"[1]", "fewer than two"),
        ("a.txt", b"", "fewer than two"),
        ("none.txt", None, "cannot be read"),
    ],
)
def test_texts_that_are_refused(good, source, tmp_path, name, data, word, capsys):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=word):
        verify(good, source, tmp_path / name)


# --- the command


def test_the_command(good, bad, source, tmp_path, capsys):
    assert main(["verify", str(good), "--source", str(source)]) == 0
    text = capsys.readouterr().out
    for word in ("checksums", "error of experts", "KL divergence", "all checks passed"):
        assert word in text
    assert "FAIL" not in text
    assert main(["verify", str(good), "--source", str(source), "--max-kl", "0", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"] is False and facts["comparison"]["families"]["experts"]["error"] > 0.01
    sorted(bad.glob("model-*"))[0].unlink()
    assert main(["verify", str(bad)]) == 1
    assert "FAIL" in capsys.readouterr().out
