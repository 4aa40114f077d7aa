"""The hub, by its own client against a stand-in on this machine: plans, downloads, uploads."""

import json
from pathlib import Path

import huggingface_hub
import mlx.core as mx
import pytest
from helpers.checkpoints import read_all, same_bits
from helpers.hub import COMMIT, serving
from helpers.tiny_checkpoint import weights, write_checkpoint, write_weights
from synthetic import write_synthetic

from mlx_kda.cli.main import main
from mlx_kda.convert import convert, plan
from mlx_kda.errors import UserError

REPO = "owner/model"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The stand-in hub, with an empty cache."""
    with serving() as server:
        client = huggingface_hub.HfApi(endpoint=server.endpoint, token="hf_nothing")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr("mlx_kda.weights.hub.api", lambda: client)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_XET_CACHE", str(tmp_path / "xet"))
        yield server


@pytest.fixture
def source(tmp_path, hub):
    """A repository with a checkpoint of two files, and code that must not be downloaded."""
    folder = write_checkpoint(tmp_path / "source")
    (folder / "modeling_kimi.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    hub.folders[REPO] = folder
    return folder


def test_a_plan_reads_headers_by_range(hub, tmp_path):
    """Of 25 MB of weights the plan fetches the headers: the first 100 KB of each file."""
    source = tmp_path / "large"
    write_synthetic(source, layers=4, experts=4, shards=5, vocabulary=1000)
    hub.folders[REPO] = source
    found = plan(REPO, tmp_path / "out", q_bits=4)
    local = plan(source, tmp_path / "out", q_bits=4)
    assert found.bytes_in == local.bytes_in == found.download_bytes
    assert (local.download_bytes, local.bytes_out) == (0, found.bytes_out)
    assert found.families == local.families and found.peak_bytes == local.peak_bytes
    files = [name for name in hub.sent if name.endswith(".safetensors")]
    assert len(files) == 5
    assert all(hub.sent[name] <= 100_001 for name in files)
    ranges = {wanted for _, path, wanted in hub.requests if path.endswith(".safetensors")}
    assert None not in ranges
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert not (tmp_path / "out").exists()


def test_a_repository_is_converted_file_by_file(hub, source, tmp_path):
    """Weights are downloaded when needed; no code, no pickles; the commit is recorded."""
    seen = []

    def progress(done, total, name):
        files = {path.name for path in (tmp_path / "cache").rglob("*.safetensors")}
        seen.append(len(files))

    report = convert(REPO, tmp_path / "out", progress=progress, shard_bytes=100_000)
    assert (report.source, report.revision) == (REPO, COMMIT)
    convert(source, tmp_path / "wanted", shard_bytes=100_000)
    got, wanted = read_all(tmp_path / "out"), read_all(tmp_path / "wanted")
    assert got.keys() == wanted.keys()
    assert all(same_bits(got[name], wanted[name]) for name in wanted)
    assert seen == sorted(seen) and seen[-1] == 2
    asked = {Path(path).suffix for _, path, _ in hub.requests if "/resolve/" in path}
    assert not asked & {".py", ".bin"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())["mlx_kda"]
    assert (config["source"], config["revision"]) == (REPO, COMMIT)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"base_model: {REPO}" in card and COMMIT in card
    assert f"mlx-kda convert {REPO} OUT" in card


def test_what_cannot_be_converted_is_refused_before_the_download(hub, source, tmp_path):
    tensors = weights()
    tensors["model.frob.weight"] = tensors.pop("model.norm.weight")
    write_weights(source, tensors)
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        convert(REPO, tmp_path / "out")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert not (tmp_path / "out").exists()


def test_a_download_that_fails_keeps_what_is_finished(hub, source, tmp_path, monkeypatch):
    """The second file fails once: --resume continues, and the first is not downloaded again."""
    second = "model-00002-of-00002.safetensors"
    real = huggingface_hub.hf_hub_download

    def refuse(repo, name, **keywords):
        if name == second:
            raise ConnectionError("connection reset by peer")
        return real(repo, name, **keywords)

    options = {"q_bits": 4, "q_group_size": 32, "shard_bytes": 60_000}
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "hf_hub_download", refuse)
        with pytest.raises(UserError, match="connection reset"):
            convert(REPO, tmp_path / "out", **options)
    assert list((tmp_path / "out.partial").glob("model-*"))
    said, before = [], hub.sent["model-00001-of-00002.safetensors"]
    convert(REPO, tmp_path / "out", **options, resume=True, log=said.append)
    assert "resuming" in said[-1]
    # headers are read again, the file is not
    assert hub.sent["model-00001-of-00002.safetensors"] - before <= 100_001
    convert(source, tmp_path / "wanted", **options)
    got, wanted = read_all(tmp_path / "out"), read_all(tmp_path / "wanted")
    assert all(same_bits(got[name], wanted[name]) for name in wanted)


def test_a_file_that_is_not_what_its_header_said(hub, source, tmp_path, monkeypatch):
    """A shard that arrives truncated is named, and the source in the cache is not blamed."""
    real = huggingface_hub.hf_hub_download

    def cut(repo, name, **options):
        path = Path(real(repo, name, **options))
        data = path.read_bytes()
        path.resolve().write_bytes(data[:-50])
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cut)
    with pytest.raises(UserError, match="truncated.*download it again"):
        convert(REPO, tmp_path / "out")


def test_a_repository_without_index(hub, tmp_path):
    source = write_checkpoint(tmp_path / "one")
    tensors = read_all(source)
    for path in source.glob("model*"):
        path.unlink()
    hub.folders[REPO] = source
    with pytest.raises(UserError, match=r"neither .* nor model\.safetensors"):
        plan(REPO, tmp_path / "out")
    mx.save_safetensors(str(source / "model.safetensors"), tensors)
    hub.folders["owner/other"] = source
    assert plan("owner/other", tmp_path / "out").bytes_in == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize(
    ("repo", "refuse", "word"),
    [
        ("owner/absent", {}, "neither a local folder nor a repository"),
        (REPO, {"/api/models/": 403}, "needs a login"),
        (REPO, {"/resolve/": 403}, "needs a login"),
    ],
)
def test_a_hub_that_refuses_is_one_line(hub, source, tmp_path, repo, refuse, word, capsys):
    hub.refuse = refuse
    for flags in ([], ["--plan"]):
        assert main(["convert", repo, str(tmp_path / "out"), *flags]) == 2
        out, err = capsys.readouterr()
        assert out == "" and word in err and err.count("mlx-kda: ") == 1
    assert not (tmp_path / "out").exists()


# --- uploads


def test_upload_sends_the_folder(hub, source, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["convert", str(source), str(out), "--q-bits", "4", "--q-group-size", "32"]
    assert main([*arguments, "--upload-repo", "someone/kimi-4bit"]) == 0
    err = capsys.readouterr().err
    assert "uploaded to" in err and "someone/kimi-4bit" in err
    sent = hub.committed["someone/kimi-4bit"]
    assert sent == {path.name: path.read_bytes() for path in out.iterdir()}
    assert {"README.md", "config.json", "conversion.json", "model.safetensors"} <= sent.keys()


def test_an_upload_that_is_refused_keeps_the_folder(hub, source, tmp_path, capsys):
    """The conversion is not lost; --resume with the same options uploads it later."""
    out, repo = tmp_path / "out", "someone/kimi"
    hub.refuse = {"/api/repos/create": 401}
    assert main(["convert", str(source), str(out), "--upload-repo", repo]) == 2
    err = capsys.readouterr().err
    assert repo in err and "Traceback" not in err
    assert (out / "config.json").is_file()
    hub.refuse = {}
    assert main(["convert", str(source), str(out), "--upload-repo", repo, "--resume"]) == 0
    assert "config.json" in hub.committed[repo]
