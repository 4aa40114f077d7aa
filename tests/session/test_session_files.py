"""Sessions on disk: going on as if nothing had been between, and files that are refused."""

import io
import json
import os
import resource
import signal
import subprocess
import sys

import mlx.core as mx
import pytest
import safetensors
from helpers.tiny_checkpoint import write_checkpoint
from mlx_lm.models.cache import ArraysCache

import mlx_kda
from mlx_kda.cache import checksum, files
from mlx_kda.cache.header import check_session
from mlx_kda.cli.main import main
from mlx_kda.errors import CheckpointError, UserError
from mlx_kda.session import Session
from mlx_kda.weights.safetensors import Spec, read_header, read_tensor
from mlx_kda.weights.safetensors_writer import write_file

POLICIES = ["exact", "window:16+4", "int8", "window:16,int4"]
IDS = [(7 * i * i + 3 * i) % 256 for i in range(340)]


def say(session, n):
    return [piece.token for piece in session.generate(n, stop_ids=[])]


def content(entry):
    """The arrays of one layer's cache, rows in one piece."""
    if isinstance(entry, ArraysCache):
        return entry.cache
    return [mx.concatenate(arrays, axis=2) for arrays in zip(*entry.store.parts(), strict=True)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("offset", [0, 1, 3, 20, 340])
def test_c9_save_load_and_go_on(tiny_model, tmp_path, offset, policy):
    """Case C9: at offsets 0, 1, 3, 20 and 340, bit for bit as if it had not been saved."""
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
def test_a_conversation_goes_on_with_its_checkpoints(tiny_model, tmp_path, policy):
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


def test_the_header_says_whose_it_is(tiny_model, tmp_path):
    session = Session(*tiny_model, "window:16+4")
    session.prefill(IDS[:9])
    session.save(tmp_path / "s")
    texts = {}
    stored = read_header(tmp_path / "s", texts)
    assert stored.keys() >= {"layers.0.3", "layers.3.1", "logits"}
    assert texts["format"] == "mlx-kda session" and texts["version"] == "2"
    assert texts["policy"] == "window:16+4"
    assert read_tensor(stored["tokens"]).tolist() == IDS[:9]
    assert len(texts["model"]) == 16


@pytest.fixture
def saved(tiny_model, tmp_path):
    session = Session(*tiny_model)
    session.prefill(IDS[:20])
    session.checkpoint()
    session.save(tmp_path / "s")
    return tmp_path / "s"


def rewrite(path, change, sealed=True):
    """The file again with its arrays and texts changed in place, and a checksum that is right."""
    texts, crc = {}, checksum.Crc32()
    arrays = {name: read_tensor(one) for name, one in read_header(path, texts).items()}
    seal = arrays.pop(checksum.NAME)
    change(arrays, texts)
    if sealed:
        arrays[checksum.NAME] = mx.zeros_like(seal)
    specs = {name: Spec(a.shape, a.dtype) for name, a in arrays.items()}
    write_file(path, specs, arrays.items(), metadata=texts, digest=crc)
    if sealed:
        checksum.seal(path, crc)


def as_first_version(arrays, texts):
    """As mlx-kda wrote it before there was a checksum; to be written without."""
    ids = {name: arrays.pop(name, mx.array([])).tolist() for name in ("tokens", "ids")}
    session = json.loads(texts["session"]) | {"ids": ids["ids"]}
    texts.update(version="1", tokens=json.dumps(ids["tokens"]), session=json.dumps(session))


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
        (put("layers.4.0", mx.zeros((1,))), "has a layer 4, this model has 4"),
        (put("layers.x.0", mx.zeros((1,))), "holds layers.x.0"),
        (put("layers.0.3", mx.zeros((1, 2, 32, 31))), "layer 0 has shapes"),
        (put("layers.3.0", mx.zeros((1, 1, 19, 32))), "layer 3 has shapes"),
        (text(version="3"), "session format 3, this program reads 1 and 2: a newer mlx-kda wrote"),
        (text(format="pt"), "is no session of mlx-kda"),
        (text(model="0" * 16), "saved with another model \\(fingerprint 0{16}"),
        (text(model="0" * 16, program="9.9"), "another model, or by mlx-kda 9.9"),
        (text(policy="window:4"), "layer 3 has shapes"),
        (text(policy="half"), "cache policy 'half' is not one of"),
        (text(session="[]"), "damaged header"),
        (text(session="{}"), "damaged header"),
        (text(version="1"), "damaged header"),
        (text(checkpoints="[[99, false]]"), "checkpoint at 99 of 20"),
    ],
)
def test_c9_a_file_that_does_not_fit_is_refused_by_name(tiny_model, saved, change, words):
    """Case C9: wrong slot counts, shapes, version, model: one line, and the file is left alone."""
    rewrite(saved, change)
    before = saved.read_bytes()
    with pytest.raises(UserError, match=words) as caught:
        Session.load(saved, *tiny_model)
    assert "\n" not in str(caught.value) and saved.read_bytes() == before


def test_c9_another_model_s_session_is_refused(tiny_model, saved, tmp_path):
    """Case C9: the same config with other weights, and another config."""
    for changes in ({"seed": 1}, {"model_max_length": 600}):
        other = mlx_kda.load(write_checkpoint(tmp_path / str(changes), **changes))
        with pytest.raises(CheckpointError, match="saved with another model"):
            Session.load(saved, *other)
    again = mlx_kda.load(write_checkpoint(tmp_path / "same"))
    assert Session.load(saved, *again).tokens == IDS[:20]


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_c9_a_truncated_file_is_refused(tiny_model, saved, keep):
    """Case C9: cut in the length, the header, the data, by one byte; the advice fits a session."""
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


@pytest.mark.parametrize("change", ["gone", "not the last"])
def test_a_checksum_that_is_not_there_is_no_way_around_it(tiny_model, saved, change):
    def move(arrays, texts):
        if change == "not the last":
            arrays["logits"], arrays[checksum.NAME] = mx.zeros((4,), mx.uint8), arrays["logits"]

    rewrite(saved, move, sealed=False)
    refused(saved, tiny_model)


def test_a_file_of_before_the_checksum_goes_on(tiny_model, talk, saved):
    """Sessions that were saved as version 1 still load, and are saved anew with a checksum."""
    for path in (talk, saved):
        wanted = Session.load(path, *tiny_model)
        rewrite(path, as_first_version, sealed=False)
        loaded = Session.load(path, *tiny_model)
        assert (loaded.tokens, loaded.transcript) == (wanted.tokens, wanted.transcript)
        loaded.save(path)
        assert checksum.NAME in read_header(path)
        assert say(Session.load(path, *tiny_model), 9) == say(wanted, 9)


def test_a_session_is_a_safetensors_file(saved):
    """The library of that name reads it too."""
    with safetensors.safe_open(saved, "mlx") as file:
        assert file.metadata()["format"] == "mlx-kda session"
        assert file.get_tensor("tokens").tolist() == IDS[:20]


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
    monkeypatch.setattr(files, "PIECE_BYTES", 250_000)
    monkeypatch.setattr(files, "WAITING", 1_000_000)
    session = Session(*tiny_model)
    session.prefill([1, 2, 3])
    latents = session.context.cache[3].store
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
    """Another program saves between two tensors: one of the two is read, not some of each."""
    other = Session(*tiny_model)
    other.prefill(IDS[30:50])
    real, count = checksum.read_bytes, 0

    def read_bytes(*args):
        nonlocal count
        count += 1
        if count == 5:
            other.save(saved)
        return real(*args)

    monkeypatch.setattr(checksum, "read_bytes", read_bytes)
    assert Session.load(saved, *tiny_model).tokens == IDS[:20]
    assert Session.load(saved, *tiny_model).tokens == IDS[30:50]


def test_no_file_and_no_session(tiny_model, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        Session.load(tmp_path / "none", *tiny_model)
    (tmp_path / "text").write_text("what is this, a file of text? " * 9)
    with pytest.raises(CheckpointError, match="is no session of mlx-kda"):
        Session.load(tmp_path / "text", *tiny_model)


@pytest.mark.parametrize("kind", ["session", "safetensors"])
def test_a_header_nested_without_end_is_one_line(tmp_path, kind):
    text = b"[" * 200_000
    (tmp_path / "s").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="no session|damaged safetensors header"):
        check_session(tmp_path / "s") if kind == "session" else read_header(tmp_path / "s")


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


def test_save_kill_load_go_on(tiny_mlx, tiny_model, tmp_path):
    """A process that saves and is killed with no chance to clean up; another goes on from there."""
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
