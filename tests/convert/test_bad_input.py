"""Sources, outputs and disks that are not as they should be: one line each, nothing left behind."""

import errno
import json
import os
import pickle
import struct
from pathlib import Path

import mlx.core as mx
import pytest
from helpers.checkpoints import edit_json, write_json
from helpers.tiny_checkpoint import weights, write_checkpoint

from mlx_kda.convert import convert, inspect
from mlx_kda.errors import UserError
from mlx_kda.weights import safetensors_writer
from mlx_kda.weights import source as checkpoint_source

FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
INDEX = "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source")


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refused(source: str | Path, out: Path, *words: str, **wish) -> None:
    """Converting fails in one line with all the words and leaves everything as it was."""
    place = Path(out).parent
    while not place.is_dir():
        place = place.parent
    before = snapshot(place)
    with pytest.raises(UserError) as caught:
        convert(source, out, **wish)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert snapshot(place) == before


# --- the source


def test_sources_that_are_no_checkpoints(tmp_path):
    out = tmp_path / "out"
    refused(tmp_path / "nowhere", out, "nowhere", "no such folder")
    refused("no-such-folder", out, "no such folder", "owner/name")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", out, "is a file", "config.json")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", out, "no checkpoint", "config.json")
    write_json(tmp_path / "empty" / "config.json", {"model_type": "kimi_linear"})
    refused(tmp_path / "empty", out, "no checkpoint", ".safetensors")
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    refused(tmp_path / "empty", out, "pickles", "safetensors")


@pytest.mark.parametrize(
    ("text", "word"), [("{", "damaged"), ("[]", "damaged"), ("", "damaged"), ("\xff", "damaged")]
)
def test_a_damaged_config(source, tmp_path, text, word):
    (source / "config.json").write_bytes(text.encode("latin-1"))
    refused(source, tmp_path / "out", "config.json", word)


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
def test_a_config_that_asks_for_what_is_not_built(source, tmp_path, change, words):
    edit_json(source / "config.json", **change)
    refused(source, tmp_path / "out", *words)


def test_a_missing_shard_is_named(source, tmp_path):
    (source / SECOND).unlink()
    refused(source, tmp_path / "out", INDEX, "missing", SECOND)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000, -1])
def test_a_truncated_shard_is_named(source, tmp_path, keep):
    """Cut before the header, inside it, inside the data, and one byte short."""
    data = (source / FIRST).read_bytes()
    (source / FIRST).write_bytes(data[:keep])
    refused(source, tmp_path / "out", FIRST, "truncated")


def header(data: bytes) -> dict:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def with_header(data: bytes, entries: dict) -> bytes:
    """The file with another header."""
    (length,) = struct.unpack("<Q", data[:8])
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


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
def test_a_damaged_entry_is_named(source, tmp_path, change, word):
    data = (source / FIRST).read_bytes()
    entries = header(data)
    name = "model.norm.weight"
    entries[name] |= change
    (source / FIRST).write_bytes(with_header(data, entries))
    refused(source, tmp_path / "out", FIRST, name, word)


@pytest.mark.parametrize("text", [b"no json at all", b"[1]", b"\xff\xfe"])
def test_a_damaged_header_is_named(source, tmp_path, text):
    data = (source / FIRST).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    (source / FIRST).write_bytes(data[:8] + text.ljust(length) + data[8 + length :])
    refused(source, tmp_path / "out", FIRST, "header")


def test_an_index_that_is_wrong(source, tmp_path):
    table = json.loads((source / INDEX).read_text())["weight_map"]
    name = "model.norm.weight"
    out = tmp_path / "out"
    for broken, words in (
        ({**table, name: "../elsewhere.safetensors"}, ("outside", "elsewhere")),
        ({**table, name: SECOND if table[name] == FIRST else FIRST}, ("wrong file", name)),
        ({**table, "model.other": FIRST}, ("no file holds", "model.other")),
        ({}, ("weight_map",)),
        (None, ("weight_map",)),
        ([1], ("weight_map",)),
    ):
        write_json(source / INDEX, {"weight_map": broken})
        refused(source, out, INDEX, *words)
    (source / INDEX).write_text("{")
    refused(source, out, INDEX, "damaged")


def test_files_beside_the_model_are_passed_by(source, tmp_path):
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
    assert snapshot(tmp_path / "a").keys() == snapshot(tmp_path / "c").keys()


def test_a_tensor_stored_twice_is_named(source, tmp_path):
    tensors = weights()
    name = "model.norm.weight"
    mx.save_safetensors(str(source / "model-extra.safetensors"), {name: tensors[name]})
    (source / INDEX).unlink()
    refused(source, tmp_path / "out", name, "stored twice", "model-extra.safetensors")


def test_a_shard_that_ends_while_it_is_read(source, tmp_path, monkeypatch):
    """The file shrinks after its header was checked, as on a failing network drive."""
    real = checkpoint_source.read_bytes

    def shrink(stored):
        if stored.file.name == SECOND:
            os.truncate(stored.file, stored.offset + stored.nbytes // 2)
        return real(stored)

    monkeypatch.setattr(checkpoint_source, "read_bytes", shrink)
    with pytest.raises(UserError, match=rf"{SECOND} is truncated"):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_damaged_tokenizer_stops_the_conversion(source, tmp_path):
    (source / "tiktoken.model").write_bytes(b"AA== 0\nnonsense\n")
    refused(source, tmp_path / "out", "tiktoken.model", "line 2")


# --- the output


def test_outputs_that_are_refused(source, tmp_path):
    refused(source, source, "source folder")
    refused(source, source / "mlx", "source folder")
    refused(source, source / ".." / source.name / "x" / "y", "source folder")
    refused(source, tmp_path, "source folder")
    (tmp_path / "file").write_text("x")
    refused(source, tmp_path / "file", "is a file")
    refused(source, tmp_path / "file" / "out", "file")
    link = tmp_path / "link"
    link.symlink_to(source)
    refused(source, link, "source folder")
    refused(source, link / "x", "source folder")


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_an_output_without_a_name_is_refused(source, tmp_path, monkeypatch, out):
    """An empty "." used to end in ValueError."""
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="has no name of its own"):
        convert(source, out)
    assert snapshot(tmp_path) == before


def test_an_output_that_exists_is_replaced_only_if_asked_and_only_if_ours(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    refused(source, out, "not empty", "--overwrite")
    refused(source, out, "not written by mlx-kda", overwrite=True)
    (out / "thesis.txt").rename(out / "conversion.json")
    refused(source, out, "not written by mlx-kda", overwrite=True)
    (out / "conversion.json").unlink()
    convert(source, out)  # an empty folder is taken
    refused(source, out, "not empty")
    report = convert(source, out, overwrite=True, dtype="float16")
    assert report.dtype == "float16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_failed_overwrite_leaves_the_old_output(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    convert(source, out)
    before = snapshot(out)
    monkeypatch.setattr("mlx_kda.convert.conversion._write_weights", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(source, out, overwrite=True)
    assert snapshot(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def failing_write(monkeypatch, after: int, error: BaseException) -> None:
    """Make the writing of weights fail after so many tensors."""
    real, count = safetensors_writer.array_bytes, 0

    def fail(array):
        nonlocal count
        count += 1
        if count > after:
            raise error
        return real(array)

    monkeypatch.setattr(safetensors_writer, "array_bytes", fail)


def kept(source: Path, out: Path, error: type[BaseException], **wish) -> str:
    """Converting fails; nothing has the final name, the source is as it was, the rest is told."""
    before, said = snapshot(source), []
    with pytest.raises(error) as caught:
        convert(source, out, shard_bytes=100_000, log=said.append, **wish)
    assert snapshot(source) == before
    assert not out.exists()
    partial = out.with_name("out.partial")
    left = sorted(path.name for path in partial.glob("*")) if partial.exists() else []
    assert not [name for name in left if name.endswith(".tmp") or name == "config.json"]
    done = [name for name in left if name.endswith(".done.json")]
    assert len([name for name in left if name.startswith("model-")]) == len(done)
    assert partial.exists() == bool(done)
    assert ["--resume" in line for line in said] == [True] * bool(done)
    return str(caught.value)


@pytest.mark.parametrize("after", [0, 5, 60])
def test_a_full_disk_keeps_what_is_finished(source, tmp_path, monkeypatch, after):
    failing_write(monkeypatch, after, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    message = kept(source, tmp_path / "out", UserError)
    assert "disk is full" in message and "\n" not in message
    assert (tmp_path / "out.partial").exists() == (after > 0)


def test_other_faults_of_the_disk_are_told(source, tmp_path, monkeypatch):
    failing_write(monkeypatch, 3, OSError(errno.EIO, os.strerror(errno.EIO)))
    refused(source, tmp_path / "out", "cannot be written", os.strerror(errno.EIO))


def test_a_disk_that_is_too_small_is_refused_beforehand(source, tmp_path, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr("mlx_kda.convert.output_dir.shutil.disk_usage", lambda path: Usage)
    failing_write(monkeypatch, 0, AssertionError("nothing may be written"))
    refused(source, tmp_path / "out", "needs", "1 KB free")


def test_a_folder_that_cannot_be_written(source, tmp_path, monkeypatch):
    real = Path.mkdir

    def mkdir(self, *args, **kwargs):
        if self.name.endswith(".partial"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    refused(source, tmp_path / "out", "cannot be written", os.strerror(errno.EACCES))


@pytest.mark.parametrize("after", [0, 5, 60])
def test_an_interrupt_keeps_what_is_finished(source, tmp_path, monkeypatch, after):
    """Ctrl-C at the beginning, in an early file, in a later one."""
    failing_write(monkeypatch, after, KeyboardInterrupt())
    kept(source, tmp_path / "out", KeyboardInterrupt)
    assert (tmp_path / "out.partial").exists() == (after > 0)


def test_while_it_is_written_nothing_looks_whole(source, tmp_path):
    """Until the end there is no folder of the final name and no config.json in the other one."""
    out, seen = tmp_path / "out", []

    def look(done, total, name):
        seen.append((done, name))
        assert not out.exists()
        names = [path.name for path in (tmp_path / "out.partial").iterdir()]
        assert "config.json" not in names
        assert INDEX not in names

    report = convert(source, out, progress=look, shard_bytes=100_000)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == report.bytes_out
    names = [path.name for path in out.iterdir()]
    assert not [name for name in names if name.startswith(".") or name.endswith(".tmp")]


def test_a_killed_conversion_does_not_block_the_next(source, tmp_path):
    """What kill -9 leaves is cleared; a foreign folder of that name is not touched."""
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / ".lock").touch()
    (partial / "model-00001-of-00009.safetensors").write_bytes(b"half")
    convert(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]

    partial.mkdir()
    (partial / "thesis.txt").write_text("years of work")
    refused(source, tmp_path / "out", "out.partial", "something else", overwrite=True)


def test_a_second_conversion_into_the_same_folder_is_refused(source, tmp_path):
    out = tmp_path / "out"
    tried = []

    def meanwhile(done, total, name):
        if not tried:
            tried.append(name)
            with pytest.raises(UserError, match="another conversion"):
                convert(source, out)

    convert(source, out, progress=meanwhile)
    assert tried
    assert (out / "config.json").is_file()


def test_the_source_is_never_changed(source, tmp_path):
    before = snapshot(source)
    convert(source, tmp_path / "a", q_bits=4, q_group_size=32)
    inspect(source)
    assert snapshot(source) == before
