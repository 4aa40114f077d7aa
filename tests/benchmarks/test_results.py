"""Results on disk: two runs that write to one folder."""

import os

import pytest

from mlx_kda.bench import results
from mlx_kda.cli.main import main
from mlx_kda.errors import UserError

ABOUT = {"command": "mlx-kda bench something"}


def test_a_second_run_into_one_folder_is_refused(tmp_path, monkeypatch, capsys):
    """Each used to put its rows over the other's, and the first to end removed them."""
    first = results.Saving(tmp_path, "op", lambda: ABOUT)
    first.add({"ms": 1.0})
    kept = first.path.read_bytes()
    monkeypatch.setattr("mlx_kda.cli.measure.run_one", lambda *_: pytest.fail("it measured"))
    assert main(["bench", "op", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "another run of bench op writes to" in err
    assert first.path.read_bytes() == kept
    other = results.Saving(tmp_path, "model", lambda: ABOUT)  # another benchmark is not in the way
    other.add({"ms": 2.0})
    first.add({"ms": 3.0})
    for saving in (first, other):
        saving.finish()
    rows = {name: results.load(tmp_path / f"{name}.json")["rows"] for name in ("op", "model")}
    assert rows == {"op": [{"ms": 1.0}, {"ms": 3.0}], "model": [{"ms": 2.0}]}
    assert sorted(os.listdir(tmp_path)) == ["model.csv", "model.json", "op.csv", "op.json"]


def test_a_run_that_stops_leaves_the_folder_to_the_next(tmp_path, monkeypatch, capsys):
    def stops(benchmark, args, add):
        add({"ms": 1.0})
        raise UserError("enough")

    monkeypatch.setattr("mlx_kda.cli.measure.run_one", stops)
    assert main(["bench", "op", "--out", str(tmp_path)]) == 2
    assert os.listdir(tmp_path) == ["op.partial.json"]
    capsys.readouterr()
    assert main(["bench", "op", "--out", str(tmp_path)]) == 2
    assert "holds the rows of a run that was stopped" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["op.partial.json"]
