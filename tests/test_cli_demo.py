"""``mlx-kda demo``: the whole way on a small checkpoint, and what it says where there is none."""

import tempfile

import pytest

from mlx_kda import demo
from mlx_kda.cli.main import main


def test_the_whole_way(tiny_hf, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["demo", str(tiny_hf), "--max-tokens", "6"]) == 0
    out = capsys.readouterr().out
    assert f"Converting {tiny_hf} to 4 bits" in out and "bits a weight" in out
    places = [out.index(text) for text in (*demo.QUESTIONS, demo.OPENING, "Which form of KDA ran")]
    assert places == sorted(places)
    assert out.count("[generation: ") == 4 and out.count("more were in the cache") == 2
    assert "  prefill: " in out and "  decode: " in out
    assert list(tmp_path.iterdir()) == [], "the converted model is not left behind"


def test_a_bad_source_leaves_nothing(tmp_path, monkeypatch, capsys):
    scratch, source = tmp_path / "scratch", tmp_path / "source"
    scratch.mkdir()
    source.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert main(["demo", str(source)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mlx-kda: ") and "config.json" in err and err.count("\n") == 1
    assert list(scratch.iterdir()) == []


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package as it is where no source checkout is around it; the folder it is run in."""
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "site-packages" / "mlx_kda" / "demo.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_its_checkpoint_it_says_what_to_do(installed, capsys):
    assert main(["demo"]) == 2
    err = capsys.readouterr().err
    assert "examples/tiny-kimi-linear is not here" in err and "mlx-kda demo SRC" in err


def test_it_is_found_in_the_current_folder(installed):
    folder = installed / demo.CHECKPOINT
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert demo.find_checkpoint(None) == demo.CHECKPOINT


def test_it_is_found_beside_an_editable_package(installed, tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    (checkout / demo.CHECKPOINT).mkdir(parents=True)
    (checkout / demo.CHECKPOINT / "config.json").write_text("{}")
    monkeypatch.setattr(demo, "__file__", str(checkout / "mlx_kda" / "demo.py"))
    assert demo.find_checkpoint(None) == checkout / demo.CHECKPOINT
