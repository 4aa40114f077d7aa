"""Where an output goes: links, an older output, other processes; nothing is lost."""

import json
import subprocess
import sys

import pytest
from helpers.tiny_checkpoint import write_checkpoint

from mlx_kda.cli.main import main
from mlx_kda.convert import conversion, convert, verify
from mlx_kda.errors import UserError


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("replace") / "source")


def dtype(folder) -> str:
    return json.loads((folder / "config.json").read_text())["torch_dtype"]


@pytest.mark.parametrize("kind", ["empty", "dangling", "older"])
def test_an_output_that_is_a_link_is_the_place_it_leads_to(source, tmp_path, kind):
    """The rename onto a link used to fail, when all files were written."""
    place, link = tmp_path / "disk" / "place", tmp_path / "here" / "link"
    place.parent.mkdir()
    link.parent.mkdir()
    if kind == "empty":
        place.mkdir()
    if kind == "older":
        convert(source, place, dtype="float16")
    link.symlink_to(place)
    convert(source, link, dtype="bfloat16", overwrite=kind == "older")
    assert link.is_symlink() and dtype(place) == "bfloat16" and verify(link).ok
    assert [path.name for path in place.parent.iterdir()] == ["place"]
    assert [path.name for path in link.parent.iterdir()] == ["link"]


@pytest.mark.parametrize("name", ["source", "link", "source/../source", "./source/"])
def test_the_source_is_no_output(source, tmp_path, capsys, name):
    (tmp_path / "source").symlink_to(source)
    (tmp_path / "link").symlink_to(tmp_path / "source")
    assert main(["convert", str(source), f"{tmp_path}/{name}", "--overwrite"]) == 2
    err = capsys.readouterr().err
    assert "is the source folder" in err and err.count("\n") == 1


# Killed between the two renames that put a new output in an older one's place.
KILLED = (
    "import os, sys; from mlx_kda.convert import output_dir; real, count = os.rename, []\n"
    "def rename(a, b):\n"
    "    count.append(a)\n"
    "    os._exit(9) if len(count) == 2 else real(a, b)\n"
    "output_dir.os.rename = rename\n"
    "from mlx_kda.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize("then", ["resume", "overwrite", "neither"])
def test_a_kill_between_the_renames_loses_neither_output(source, tmp_path, then):
    """The older output used to stay behind under a made-up name."""
    out = tmp_path / "out"
    convert(source, out, dtype="float16")
    command = [sys.executable, "-c", KILLED, "convert", source, out, "--dtype", "bfloat16"]
    done = subprocess.run([*map(str, command), "--overwrite"], capture_output=True, text=True)
    assert done.returncode == 9 and not out.exists()
    if then == "neither":
        with pytest.raises(UserError, match="not empty"):
            convert(source, out, dtype="bfloat16")
        assert dtype(out) == "float16" and verify(out).ok
        convert(source, out, dtype="bfloat16", resume=True, overwrite=True)
    else:
        convert(source, out, dtype="bfloat16", resume=then == "resume", overwrite=True)
    assert dtype(out) == "bfloat16" and verify(out).ok
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_an_output_that_appears_meanwhile_is_not_replaced(source, tmp_path, monkeypatch):
    """Another process finishes between the look at the output and the lock."""
    out, real = tmp_path / "out", conversion.read_aux_files

    def meanwhile(origin):
        monkeypatch.setattr(conversion, "read_aux_files", real)
        convert(source, out, dtype="float16")
        return real(origin)

    monkeypatch.setattr(conversion, "read_aux_files", meanwhile)
    with pytest.raises(UserError, match="not empty"):
        convert(source, out, dtype="bfloat16")
    assert dtype(out) == "float16" and verify(out).ok
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_repository_to_upload_to_is_checked_before_the_work(source, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path / "out"), "--upload-repo", "x"]) == 2
    assert "owner/name" in capsys.readouterr().err and not list(tmp_path.iterdir())
