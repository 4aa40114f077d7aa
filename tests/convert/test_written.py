"""The files of a converted folder, its report, and `inspect`."""

import hashlib
import json
import pickle
import shutil
from dataclasses import asdict
from typing import ClassVar

import huggingface_hub
import mlx.core as mx
import pytest
from helpers.checkpoints import edit_json, read_all, same_bits
from helpers.tiny_checkpoint import CONFIG, SPECIAL_IDS, TEMPLATE, weights, write_checkpoint
from huggingface_hub import errors

from mlx_kda.convert import convert, inspect
from mlx_kda.errors import UserError


def test_any_shard_size_gives_the_same_tensors(source, tmp_path):
    """Sharding and streaming change no bit: one file, a few, and one for each tensor."""
    convert(source, tmp_path / "whole")
    whole = read_all(tmp_path / "whole")
    for size, at_least in ((300_000, 3), (1, 70)):
        out = tmp_path / str(size)
        report = convert(source, out, shard_bytes=size)
        parts = read_all(out)
        assert parts.keys() == whole.keys()
        assert all(same_bits(parts[name], whole[name]) for name in whole)
        files = sorted(out.glob("model-*.safetensors"))
        assert len(files) == len(report.files) >= at_least
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == report.bytes_out
        for name, file in index["weight_map"].items():
            assert name in mx.load(str(out / file))
        assert index["weight_map"].keys() == whole.keys()
    # a file exceeds its size only if one step alone does
    largest = max(path.stat().st_size for path in (tmp_path / "300000").glob("model-*"))
    assert largest < 300_000 + 10_000


def test_the_report_is_true(source, tmp_path):
    out = tmp_path / "out"
    report = convert(source, out, q_bits=4, q_group_size=32, shard_bytes=200_000)
    written = json.loads((out / "conversion.json").read_text())
    assert written["written_by"] == "mlx-kda"
    assert report.source == str(source)
    own = ("out", "source", "seconds")
    facts = {key: value for key, value in asdict(report).items() if key not in own}
    assert {key: written[key] for key in facts} == facts
    # the file may be published: it names no path of this machine
    assert written["source"] == source.name
    for name in ("conversion.json", "conversion.txt", "README.md", "config.json"):
        assert str(source.parent) not in (out / name).read_text()
    assert report.as_dict()["bits_per_weight"] == written["bits_per_weight"]
    given, result = read_all(source), read_all(out)
    assert report.tensors_in == len(given)
    assert report.tensors_out == len(result)
    assert report.bytes_in == sum(tensor.nbytes for tensor in given.values())
    assert report.bytes_out == sum(tensor.nbytes for tensor in result.values())
    assert report.parameters == sum(tensor.size for tensor in given.values())
    assert report.bits_per_weight == 8 * report.bytes_out / report.parameters
    assert sum(f["bytes"] for f in report.families.values()) == report.bytes_out
    assert sum(f["tensors"] for f in report.families.values()) == report.tensors_out
    assert "other" not in report.families
    for name, entry in report.files.items():
        data = (out / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    text = "\n".join(report.lines())
    for word in ("4 bits", "gate path", "bits per weight", "tiktoken.model -> tokenizer.json"):
        assert word in text


def test_the_written_folder_has_what_a_model_needs(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    (source / "LICENSE").write_text("do what you like")
    out = tmp_path / "out"
    convert(source, out)
    assert {path.name for path in out.iterdir()} == {
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "config.json",
        "conversion.json",
        "conversion.txt",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
    ends = {SPECIAL_IDS["[EOS]"], SPECIAL_IDS["<|im_end|>"]}
    for name in ("config.json", "generation_config.json"):
        assert set(json.loads((out / name).read_text())["eos_token_id"]) == ends


def test_both_end_tokens_are_written_where_the_source_names_one(tmp_path):
    """[EOS] and <|im_end|> end a reply, whichever of them the source's configs name."""
    source = write_checkpoint(tmp_path / "source")
    edit_json(source / "generation_config.json", eos_token_id=SPECIAL_IDS["<|im_end|>"], top_p=0.9)
    convert(source, tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert set(generation.pop("eos_token_id")) == {266, 265}
    assert generation == {"top_p": 0.9}


def test_a_source_without_tokenizer_converts_and_says_so(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json"):
        (source / name).unlink()
    report = convert(source, tmp_path / "out")
    assert report.tokenizer is None
    assert report.warnings == ["the source has no tokenizer"]


def test_remote_code_and_pickles_are_neither_run_nor_copied(tmp_path):
    source = write_checkpoint(tmp_path / "source", auto_map={"AutoModel": "modeling_kimi.Kimi"})
    mark = tmp_path / "executed"
    for name in ("modeling_kimi.py", "configuration_kimi.py", "tokenization_kimi.py"):
        (source / name).write_text(f"open({str(mark)!r}, 'w')")

    class Bomb:
        def __reduce__(self):
            return (open, (str(mark), "w"))

    for name in ("pytorch_model.bin", "optimizer.pt"):
        (source / name).write_bytes(pickle.dumps(Bomb()))
    convert(source, tmp_path / "out")
    inspect(source)
    assert not mark.exists()
    assert not [p for p in (tmp_path / "out").iterdir() if p.suffix in (".py", ".bin", ".pt")]
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((tmp_path / "out" / name).read_text())


# --- inspect


def test_inspect_describes_both_kinds_of_folders(source, tmp_path):
    convert(source, tmp_path / "out", q_bits=4, q_group_size=32)
    theirs, ours = inspect(source), inspect(tmp_path / "out")
    assert (theirs.format, ours.format) == ("huggingface", "mlx")
    assert theirs.parameters == ours.parameters
    assert theirs.layer_types == ours.layer_types == {"kda": 3, "mla": 1}
    assert theirs.context == ours.context == CONFIG["model_max_length"]
    assert theirs.quantization is None
    assert ours.quantization["bits"] == 4
    assert (theirs.files, ours.files) == (2, 1)
    assert theirs.problem is None
    assert ours.problem is None
    for facts, folder in ((theirs, source), (ours, tmp_path / "out")):
        tensors = read_all(folder)
        assert facts.tensors == len(tensors)
        assert facts.nbytes == sum(facts.dtypes.values()) == sum(t.nbytes for t in tensors.values())
        assert sum(entry["bytes"] for entry in facts.families.values()) == facts.nbytes
        assert json.loads(json.dumps(facts.as_dict())) == facts.as_dict()
    assert theirs.families.keys() == ours.families.keys()


def test_inspect_reads_headers_only(source, tmp_path):
    """A file with a hole where its tensors are is described all the same."""
    shutil.copytree(source, tmp_path / "copy")
    for path in (tmp_path / "copy").glob("*.safetensors"):
        size = path.stat().st_size
        length = int.from_bytes(path.read_bytes()[:8], "little")
        with path.open("r+b") as file:
            file.truncate(8 + length)
            file.truncate(size)
    assert inspect(tmp_path / "copy").families == inspect(source).families


def test_inspect_describes_what_cannot_be_converted(tmp_path):
    folder = write_checkpoint(tmp_path / "a", model_type="mystery")
    facts = inspect(folder)
    assert "mystery" in facts.problem
    assert facts.tensors == len(weights())


# --- the hub, without network


class _Response:
    """What the hub's errors read of a response."""

    headers: ClassVar[dict] = {}
    status_code, request = 404, None


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (errors.RepositoryNotFoundError("404 Error.\nfor url", response=_Response()), "neither"),
        (errors.GatedRepoError("403 Client Error.\nAccess", response=_Response()), "login"),
        (errors.RevisionNotFoundError("no such\nx", response=_Response()), "no such"),
        (errors.LocalEntryNotFoundError("cannot find it\nConnection"), "cannot find"),
        (ConnectionError("Name or service not known\nx"), "Name or service"),
        (OSError(28, "No space left on device"), "No space left"),
        (TimeoutError(), "TimeoutError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_hub_that_does_not_answer_is_one_line(error, word, tmp_path, monkeypatch):
    def snapshot_download(repo, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError) as caught:
        convert("owner/model", tmp_path / "out")
    assert word in str(caught.value) and "owner/model" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
