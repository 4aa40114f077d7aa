"""Sources that are damaged or not supported: one line each, nothing left behind."""

import json
import os
import pickle
import struct
from pathlib import Path

import mlx.core as mx
import pytest
from helpers.checkpoints import edit_json, files_of, write_json
from helpers.tiny_checkpoint import weights, write_checkpoint

from mlx_kda.convert import convert, inspect
from mlx_kda.errors import UserError
from mlx_kda.weights import source as source_module

FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
INDEX = "model.safetensors.index.json"
NAME = "model.norm.weight"


@pytest.fixture
def source(tmp_path):
    """A checkpoint to be damaged."""
    return write_checkpoint(tmp_path / "source")


@pytest.fixture
def refused(tmp_path):
    """Converting fails in one line with all the words, and leaves everything as it was."""

    def check(source: str | Path, *words: str) -> None:
        before = files_of(tmp_path)
        with pytest.raises(UserError) as caught:
            convert(source, tmp_path / "out")
        assert all(word in str(caught.value) for word in words), caught.value
        assert "\n" not in str(caught.value)
        assert files_of(tmp_path) == before

    return check


def test_sources_that_are_no_checkpoints(tmp_path, refused):
    refused(tmp_path / "nowhere", "nowhere", "no such folder")
    refused("no-such-folder", "no such folder", "owner/name")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is a file", "config.json")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "not a checkpoint", "config.json")
    write_json(tmp_path / "empty" / "config.json", {"model_type": "kimi_linear"})
    refused(tmp_path / "empty", "not a checkpoint", ".safetensors")
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    refused(tmp_path / "empty", "pickles", "safetensors")


@pytest.mark.parametrize("data", [b"{", b"[]", b"", b"\xff"])
def test_a_damaged_config(source, refused, data):
    (source / "config.json").write_bytes(data)
    refused(source, "config.json", "damaged")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, ("llama", "kimi_linear")),
        ({"model_type": None}, ("model_type",)),
        ({"hidden_size": None}, ("hidden_size",)),
        ({"mla_use_nope": False}, ("mla_use_nope",)),
        ({"q_lora_rank": 8}, ("q_lora_rank",)),
        ({"num_hidden_layers": 5}, ("layer",)),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, ("compressed-tensors",)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("fp8",)),
        ({"rms_norm_eps": "small"}, ("config.json",)),
        ({"linear_attn_config": {"kda_layers": "all"}}, ("config.json",)),
        ({"linear_attn_config": 5}, ("config.json",)),
        ({"vocab_size": "many"}, ("vocab_size",)),
        ({"eos_token_id": "x"}, ("eos_token_id",)),
    ],
)
def test_a_config_that_is_not_supported(source, refused, change, words):
    edit_json(source / "config.json", **change)
    refused(source, *words)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000, -1, None])
def test_a_truncated_or_missing_shard_is_named(source, refused, keep):
    """Cut before the header, inside it, inside the data, one byte short; or not there at all."""
    if keep is None:
        (source / SECOND).unlink()
        return refused(source, INDEX, "missing", SECOND)
    data = (source / FIRST).read_bytes()
    (source / FIRST).write_bytes(data[:keep])
    refused(source, FIRST, "truncated")


def edit_header(file: Path, change) -> None:
    """Replace the header of a safetensors file by what ``change`` makes of its bytes."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = change(data[8 : 8 + length])
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"dtype": "F8_E4M3"}, "F8_E4M3"),
        ({"shape": [3, 3]}, "damaged"),
        ({"shape": None}, "damaged"),
        ({"data_offsets": [0]}, "damaged"),
        ({"data_offsets": [-8, 0]}, "damaged"),
    ],
)
def test_a_damaged_entry_is_named(source, refused, change, word):
    def damage(header):
        entries = json.loads(header)
        return json.dumps(entries | {NAME: entries[NAME] | change}).encode()

    edit_header(source / FIRST, damage)
    refused(source, FIRST, NAME, word)


@pytest.mark.parametrize("text", [b"no json at all", b"[1]", b"\xff\xfe"])
def test_a_damaged_header_is_named(source, refused, text):
    edit_header(source / FIRST, lambda header: text.ljust(len(header)))
    refused(source, FIRST, "header")


def test_an_index_that_is_wrong(source, refused):
    table = json.loads((source / INDEX).read_text())["weight_map"]
    for broken, words in (
        ({**table, NAME: "../elsewhere.safetensors"}, ("outside", "elsewhere")),
        ({**table, NAME: SECOND if table[NAME] == FIRST else FIRST}, ("wrong file", NAME)),
        ({**table, "model.other": FIRST}, ("no file holds", "model.other")),
        ({}, ("weight_map",)),
        (None, ("weight_map",)),
        ([1], ("weight_map",)),
    ):
        write_json(source / INDEX, {"weight_map": broken})
        refused(source, INDEX, *words)
    (source / INDEX).write_text("{")
    refused(source, INDEX, "damaged")


def test_files_beside_the_model_are_ignored(source, tmp_path):
    """An adapter, or the same weights in another layout, is not part of the checkpoint."""
    mx.save_safetensors(str(source / "adapters.safetensors"), {"x": mx.zeros((2,))})
    mx.save_safetensors(str(source / "model-unlisted.safetensors"), {"x": mx.zeros((2,))})
    convert(source, tmp_path / "a")
    (source / INDEX).unlink()
    (source / "model-unlisted.safetensors").unlink()
    convert(source, tmp_path / "b")
    for path in sorted(source.glob("model*")):
        path.rename(source / path.name.replace("model", "weights"))
    (source / "adapters.safetensors").unlink()
    convert(source, tmp_path / "c")
    assert files_of(tmp_path / "a").keys() == files_of(tmp_path / "c").keys()


def test_a_tensor_stored_twice_is_named(source, refused):
    extra = source / "model-extra.safetensors"
    mx.save_safetensors(str(extra), {NAME: weights()[NAME]})
    (source / INDEX).unlink()
    refused(source, NAME, "stored twice", extra.name)


def test_a_shard_that_ends_while_it_is_read(source, tmp_path, monkeypatch):
    """The file shrinks after its header was checked, as on a failing network drive."""
    real = source_module.read_bytes

    def shrink(stored):
        if stored.file.name == SECOND:
            os.truncate(stored.file, stored.offset + stored.nbytes // 2)
        return real(stored)

    monkeypatch.setattr(source_module, "read_bytes", shrink)
    with pytest.raises(UserError, match=rf"{SECOND} is truncated"):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_damaged_tokenizer_stops_the_conversion(source, refused):
    (source / "tiktoken.model").write_bytes(b"AA== 0\nnonsense\n")
    refused(source, "tiktoken.model", "line 2")


def test_the_source_is_never_changed(source, tmp_path):
    before = files_of(source)
    convert(source, tmp_path / "a", q_bits=4, q_group_size=32)
    inspect(source)
    assert files_of(source) == before
