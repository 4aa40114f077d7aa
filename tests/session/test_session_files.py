"""Session files: a loaded session continues like one never saved, and bad files are refused."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import mlx.core as mx
import pytest
import safetensors
from helpers import tiny
from helpers.tiny import difference
from helpers.tiny_checkpoint import write_checkpoint
from mlx_lm.models.cache import ArraysCache
from tolerances import MODEL_SPLIT

import mlx_kda
from mlx_kda.cache import session_format
from mlx_kda.cache.session_format import check_session
from mlx_kda.cli.main import main
from mlx_kda.errors import CheckpointError, UserError
from mlx_kda.session import Session
from mlx_kda.weights.safetensors import read_header

STORED = Path(__file__).parent / "format2"
POLICIES = ["exact", "window:16+4", "int8", "window:16,int4"]
IDS = [(7 * i * i + 3 * i) % 256 for i in range(340)]


def tiny_model_of_the_stored_files():
    return tiny.tiny_model(
        seed=3,
        num_hidden_layers=2,
        kda_layers=[1],
        full_attn_layers=[2],
        num_heads=1,
        head_dim=16,
        num_experts=0,
        hidden_size=32,
    )


def say(session, n):
    return [piece.token for piece in session.generate(n, stop_ids=[])]


def content(entry):
    """The arrays of one layer's cache, rows in one piece."""
    if isinstance(entry, ArraysCache):
        return entry.cache
    return [mx.concatenate(arrays, axis=2) for arrays in zip(*entry.storage.parts(), strict=True)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("offset", [0, 1, 3, 20, 340])
def test_save_load_and_continue(tiny_model, tmp_path, offset, policy):
    """At offsets 0, 1, 3, 20 and 340, bit for bit as if it had not been saved."""
    session = Session(*tiny_model, policy)
    if offset:
        session.prefill(IDS[:offset])
    session.save(tmp_path / "a session")
    loaded = Session.load(tmp_path / "a session", *tiny_model)
    assert loaded.tokens == IDS[:offset] and loaded.policy == session.policy
    for one in (session, loaded):
        one.prefill([5, 6, 7])
    assert mx.array_equal(session.context.logits, loaded.context.logits)
    assert say(session, 20) == say(loaded, 20)
    assert mx.array_equal(session.context.logits, loaded.context.logits)
    for a, b in zip(session.context.cache, loaded.context.cache, strict=True):
        assert all(mx.array_equal(x, y) for x, y in zip(content(a), content(b), strict=True))
    assert loaded.context.cache[0][3].dtype == mx.float32


@pytest.mark.parametrize("policy", ["exact", "window:16+4"])
def test_a_conversation_continues_with_its_checkpoints(tiny_model, tmp_path, policy):
    session = Session(*tiny_model, policy, system="be brief")
    for text in ("one", "two"):
        list(session.send(text, max_tokens=8))
    mine = session.checkpoint()
    session.save(tmp_path / "talk")
    loaded = Session.load(tmp_path / "talk", *tiny_model)
    assert loaded.messages == session.messages and loaded.system == "be brief"
    assert [p.offset for p in loaded.context.checkpoints if not p.automatic] == [mine.offset]
    for one in (session, loaded):
        list(one.regenerate(max_tokens=8))
        assert one.statistics.prefilled_tokens == 0, "the checkpoint before the answer was saved"
        list(one.send("three", max_tokens=8))
        assert one.statistics.prefilled_tokens < 30
    assert loaded.messages == session.messages and loaded.tokens == session.tokens
    assert loaded.undo() == session.undo() == "three"
    assert loaded.tokens == session.tokens


def test_a_session_is_a_safetensors_file(tiny_model, tmp_path):
    """The library of that name reads it; the metadata names format, model and policy."""
    session = Session(*tiny_model, "window:16+4")
    session.prefill(IDS[:9])
    session.save(tmp_path / "s")
    with safetensors.safe_open(tmp_path / "s", "mlx") as file:
        texts = file.metadata()
        assert (texts["format"], texts["version"]) == ("mlx-kda session", "2")
        assert texts["policy"] == "window:16+4" and len(texts["model"]) == 16
        assert {"layers.0.3", "layers.3.1", "logits"} <= set(file.keys())
        assert file.get_tensor("tokens").tolist() == IDS[:9]


@pytest.fixture
def saved(tiny_model, tmp_path):
    session = Session(*tiny_model)
    session.prefill(IDS[:20])
    session.checkpoint()
    session.save(tmp_path / "s")
    return tmp_path / "s"


def rewrite(path, change, sealed=True):
    """The file again with its arrays and texts changed in place, and a checksum that is right."""
    arrays, texts = mx.load(str(path), format="safetensors", return_metadata=True)
    mx.eval(arrays)
    del arrays["crc32"]
    change(arrays, texts)
    header, data = {"__metadata__": texts}, b""
    for name, array in arrays.items():
        kind = "F32" if array.dtype == mx.float32 else "I32"
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": offsets}
        data += bytes(array)
    if sealed:
        offsets = [len(data), len(data) + 4]
        header["crc32"] = {"dtype": "U8", "shape": [4], "data_offsets": offsets}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + data
    crc = zlib.crc32(data + bytes(4)).to_bytes(4, "little")
    path.write_bytes(data + crc if sealed else data)


def drop(name):
    return lambda arrays, texts: arrays.pop(name)


def put(name, array):
    return lambda arrays, texts: arrays.update({name: array})


def text(**changes):
    return lambda arrays, texts: texts.update(changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("layers.1.2"), "layer 1 has 3 arrays, the cache of this model has 4"),
        (drop("layers.3.1"), "layer 3 has 1 arrays, the cache of this model has 2"),
        (drop("checkpoints.0.layers.0.0"), "layer 0 has 3 arrays"),
        (put("layers.0.4", mx.zeros((1,))), "layer 0 has 5 arrays"),
        (put("layers.4.0", mx.zeros((1,))), "has a layer 4, but this model has 4 layers"),
        (put("layers.x.0", mx.zeros((1,))), "unexpected tensor layers.x.0"),
        (put("layers.0.3", mx.zeros((1, 2, 32, 31))), "layer 0 has shapes"),
        (put("layers.3.0", mx.zeros((1, 1, 19, 32))), "layer 3 has shapes"),
        (text(version="3"), "session format 3, this program reads 2: .* a newer mlx-kda"),
        (text(format="pt"), "is not an mlx-kda session"),
        (text(model="0" * 16), "saved with another model \\(fingerprint 0{16}"),
        (text(model="0" * 16, program="9.9"), "another model, or by mlx-kda 9.9"),
        (text(policy="window:4"), "layer 3 has shapes"),
        (text(policy="half"), "cache policy 'half' is not one of"),
        (text(session="[]"), "damaged header"),
        (text(session="{}"), "damaged header"),
        (text(version="1"), "session format 1, which this version of mlx-kda no longer reads"),
        (text(checkpoints="[[99, false]]"), "checkpoint at 99 of 20"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(tiny_model, saved, change, words):
    """Wrong slot counts, shapes, version, model: one line, and the file is left alone."""
    rewrite(saved, change)
    before = saved.read_bytes()
    with pytest.raises(UserError, match=words) as caught:
        Session.load(saved, *tiny_model)
    assert "\n" not in str(caught.value) and saved.read_bytes() == before


def test_another_model_s_session_is_refused(tiny_model, saved, tmp_path):
    """The same config with other weights, and another config."""
    for changes in ({"seed": 1}, {"model_max_length": 600}):
        other = mlx_kda.load(write_checkpoint(tmp_path / str(changes), **changes))
        with pytest.raises(CheckpointError, match="saved with another model"):
            Session.load(saved, *other)
    again = mlx_kda.load(write_checkpoint(tmp_path / "same"))
    assert Session.load(saved, *again).tokens == IDS[:20]


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_a_truncated_file_is_refused(tiny_model, saved, keep):
    """Cut in the length, the header, the data, by one byte; the advice fits a session."""
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError, match="truncated") as caught:
        Session.load(saved, *tiny_model)
    assert "download" not in str(caught.value)


def refused(path, model):
    """What is said of a damaged file: one line, no advice to download it."""
    with pytest.raises(CheckpointError) as caught:
        Session.load(path, *model)
    said = str(caught.value)
    assert "\n" not in said and "download" not in said and path.name in said
    return said


def places(path):
    """(name, byte) of the middle of every tensor, and bytes of the header and of its length."""
    stored = read_header(path)
    data = path.read_bytes()
    texts = [b'"version"', b'"policy"', b'"model"', b'"automatic', b"layers.1.2", b"checkpoints"]
    found = {name: one.offset + one.nbytes // 2 for name, one in stored.items()}
    found |= {text.decode(): data.index(text) + 2 for text in texts if text in data}
    return found | {"a message": data.index(b"be brief"), "the length": 0, "the last byte": -1}


@pytest.fixture
def talk(tiny_model, tmp_path):
    """The file of a conversation."""
    session = Session(*tiny_model, "window:16+4", system="be brief")
    list(session.send("one", max_tokens=8))
    session.checkpoint()
    session.save(tmp_path / "talk")
    return tmp_path / "talk"


def test_a_flipped_bit_anywhere_is_noticed(tiny_model, talk):
    """One bit of each tensor, of the messages, of the header, of the checksum: never loaded."""
    whole = talk.read_bytes()
    for place in places(talk).values():
        data = bytearray(whole)
        data[place] ^= 1
        talk.write_bytes(data)
        refused(talk, tiny_model)
    talk.write_bytes(whole)
    assert Session.load(talk, *tiny_model).messages[0]["content"] == "be brief"


@pytest.mark.parametrize("begin", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("count", [1, 512, 4096])
def test_zeros_written_into_the_middle_are_noticed(tiny_model, saved, begin, count):
    """As a disk leaves them that lost a block when the machine went down."""
    data = bytearray(saved.read_bytes())
    at = int(len(data) * begin)
    at += next(i for i, byte in enumerate(data[at:]) if byte)  # a zero there is no damage
    data[at : at + count] = bytes(len(data[at : at + count]))
    saved.write_bytes(data)
    assert "is damaged: its contents are not what was saved" in refused(saved, tiny_model)


@pytest.mark.parametrize("keep", [0.5, -4, -1])
def test_a_file_cut_short_and_filled_up_with_zeros_is_noticed(tiny_model, saved, keep):
    """The size is right: what a file system leaves that had not written the end yet."""
    data = saved.read_bytes()
    keep = int(len(data) * keep) if isinstance(keep, float) else keep
    saved.write_bytes(data[:keep].ljust(len(data), b"\0"))
    assert "checksum" in refused(saved, tiny_model)
    saved.write_bytes(data + b"\0")
    assert "checksum" in refused(saved, tiny_model)


def test_a_file_without_a_checksum_is_refused(tiny_model, saved):
    rewrite(saved, lambda arrays, texts: None, sealed=False)
    refused(saved, tiny_model)


@pytest.mark.parametrize(
    ("policy", "name"), [("exact", "exact"), ("window:8+2,int8", "window_int8")]
)
def test_files_of_format_2_written_by_mlx_kda_0_1_still_load(tmp_path, policy, name):
    """Same fingerprint, contents and continuation, and saved again to the same tensors."""
    model = tiny_model_of_the_stored_files()
    loaded = Session.load(STORED / f"{name}.session", model, None)
    ids = [(7 * i * i + 3 * i) % 128 for i in range(24)]
    assert loaded.tokens == ids and str(loaded.policy) == policy and loaded.system == "be brief"
    assert [m["content"] for m in loaded.messages] == ["be brief", "é?", "yes"]
    assert loaded.transcript.ids == ids[:22] and loaded.transcript.said == {2: 22}
    points = [(p.offset, p.automatic) for p in loaded.context.checkpoints]
    assert points == [(10, True), (20, False)]
    loaded.save(tmp_path / "again")
    old, new = (
        mx.load(str(p), format="safetensors")
        for p in (STORED / f"{name}.session", tmp_path / "again")
    )
    assert old.keys() == new.keys()
    assert all(mx.array_equal(old[key], new[key]) for key in old.keys() - {"crc32"})
    whole = Session(model, None, policy)
    whole.prefill([*ids, 5, 6])
    loaded.prefill([5, 6])
    assert difference(loaded.context.logits, whole.context.logits) < MODEL_SPLIT
    loaded.rewind(10)
    loaded.prefill([*ids[10:], 5, 6])
    assert difference(loaded.context.logits, whole.context.logits) < MODEL_SPLIT


@pytest.mark.parametrize("option", ["--session", "--resume"])
def test_a_chat_does_not_begin_with_a_damaged_file(tiny_mlx, talk, capsys, monkeypatch, option):
    """One line, exit status 2, no answer; the file stays as it is and nothing is put beside it."""
    data = bytearray(talk.read_bytes())
    data[places(talk)["layers.1.3"]] ^= 64
    talk.write_bytes(data)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", str(tiny_mlx), option, str(talk)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "is damaged" in err and "Traceback" not in err
    assert talk.read_bytes() == data and os.listdir(talk.parent) == ["talk"]


def test_saving_makes_no_second_copy_of_the_latents(tiny_model, tmp_path, monkeypatch):
    """A save used to put all layers' latents together first: twice the memory, while it wrote."""
    monkeypatch.setattr(session_format, "PIECE_BYTES", 250_000)
    session = Session(*tiny_model)
    session.prefill([1, 2, 3])
    latents = session.context.cache[3].storage
    n, widths = 100_000, tiny_model[0].args
    sizes = (widths.kv_lora_rank, widths.qk_rope_head_dim)
    latents.append(tuple(mx.random.normal((1, 1, n, size)) for size in sizes))
    session.context.tokens += [7] * n
    mx.eval(latents.arrays())
    kept = n * sum(sizes) * 4
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    session.save(tmp_path / "long")
    assert kept > 20e6 and mx.get_peak_memory() - before < kept / 4
    loaded = Session.load(tmp_path / "long", *tiny_model)
    for a, b in zip(session.context.cache, loaded.context.cache, strict=True):
        assert all(mx.array_equal(x, y) for x, y in zip(content(a), content(b), strict=True))


def test_a_file_that_is_replaced_while_it_is_read(tiny_model, saved, monkeypatch):
    """Another program saves while it is open: one of the two is read, not some of each."""
    other = Session(*tiny_model)
    other.prefill(IDS[30:50])
    real = mx.load

    def load(file, **options):
        other.save(saved)
        return real(file, **options)

    monkeypatch.setattr(mx, "load", load)
    assert Session.load(saved, *tiny_model).tokens == IDS[:20]
    monkeypatch.undo()
    assert Session.load(saved, *tiny_model).tokens == IDS[30:50]


def test_no_file_and_no_session(tiny_model, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        Session.load(tmp_path / "none", *tiny_model)
    (tmp_path / "text").write_text("what is this, a file of text? " * 9)
    with pytest.raises(CheckpointError, match="is not an mlx-kda session"):
        Session.load(tmp_path / "text", *tiny_model)


def test_a_header_nested_without_end_is_one_line(tmp_path):
    text = b"[" * 200_000
    (tmp_path / "s").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="not an mlx-kda session"):
        check_session(tmp_path / "s")


def test_a_full_disk_leaves_the_old_file(tiny_model, saved):
    """A write that fails half way: one line, the old file as it was, nothing left beside it."""
    before = saved.read_bytes()
    session = Session.load(saved, *tiny_model)
    session.prefill(IDS[20:300])
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot save .*: .*untouched"):
            session.save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]
    session.save(saved)
    assert Session.load(saved, *tiny_model).tokens == IDS[:300]


def test_a_folder_that_is_not_there(tiny_model, tmp_path):
    session = Session(*tiny_model)
    with pytest.raises(UserError, match="cannot save"):
        session.save(tmp_path / "none" / "s")


def test_save_kill_load_continue(tiny_mlx, tiny_model, tmp_path):
    """A process saves and is killed with no chance to clean up; another one continues."""
    script = (
        "import os, sys, mlx_kda\n"
        "from mlx_kda.session import Session\n"
        "session = Session(*mlx_kda.load(sys.argv[1]), 'window:32+4')\n"
        "session.prefill([(7 * i * i + 3 * i) % 256 for i in range(100)])\n"
        "list(session.generate(5, stop_ids=[]))\n"
        "session.save(sys.argv[2])\n"
        "list(session.generate(5, stop_ids=[]))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "s"
    done = subprocess.run([sys.executable, "-c", script, str(tiny_mlx), str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    session = Session(*tiny_model, "window:32+4")
    session.prefill(IDS[:100])
    want = say(session, 25)
    loaded = Session.load(path, *tiny_model)
    assert loaded.tokens == IDS[:100] + want[:5]
    assert say(loaded, 20) == want[5:]
