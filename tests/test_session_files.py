"""Sessions on disk: going on as if nothing had been between, and files that are refused."""

import json
import resource
import signal
import subprocess
import sys

import mlx.core as mx
import pytest
from helpers.tiny_checkpoint import write_checkpoint

import mlx_kda
from mlx_kda.convert.tensor_files import Spec, read_header, read_tensor
from mlx_kda.convert.writing import write_file
from mlx_kda.errors import CheckpointError, UserError
from mlx_kda.session import Session

POLICIES = ["exact", "window:16+4", "int8", "window:16,int4"]
IDS = [(7 * i * i + 3 * i) % 256 for i in range(340)]


def say(session, n):
    return [piece.token for piece in session.generate(n, stop_ids=[])]


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
        arrays = [getattr(one, "cache", None) or one.store.export() for one in (a, b)]
        assert all(mx.array_equal(x, y) for x, y in zip(*arrays, strict=True))
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
    assert read_header(tmp_path / "s", texts).keys() >= {"layers.0.3", "layers.3.1", "logits"}
    assert texts["format"] == "mlx-kda session" and texts["version"] == "1"
    assert texts["policy"] == "window:16+4" and json.loads(texts["tokens"]) == IDS[:9]
    assert len(texts["model"]) == 16


@pytest.fixture
def saved(tiny_model, tmp_path):
    session = Session(*tiny_model)
    session.prefill(IDS[:20])
    session.checkpoint()
    session.save(tmp_path / "s")
    return tmp_path / "s"


def rewrite(path, change):
    """The file again with its arrays and texts changed in place."""
    texts = {}
    arrays = {name: read_tensor(one) for name, one in read_header(path, texts).items()}
    change(arrays, texts)
    specs = {name: Spec(a.shape, a.dtype) for name, a in arrays.items()}
    write_file(path, specs, arrays.items(), metadata=texts)


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
        (text(version="2"), "session format 2, this program reads 1"),
        (text(format="pt"), "is no session of mlx-kda"),
        (text(model="0" * 16), "another model"),
        (text(policy="window:4"), "layer 3 has shapes"),
        (text(policy="half"), "cache policy 'half' is not one of"),
        (text(tokens="[1, 2"), "damaged header"),
        (text(session="[]"), "damaged header"),
        (text(session="{}"), "damaged header"),
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


def test_no_file_and_no_session(tiny_model, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        Session.load(tmp_path / "none", *tiny_model)
    (tmp_path / "text").write_text("what is this, a file of text? " * 9)
    with pytest.raises(CheckpointError, match="is no session of mlx-kda"):
        Session.load(tmp_path / "text", *tiny_model)


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
