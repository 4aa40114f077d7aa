"""`mlx-kda bench`: what it prints and writes, and what it refuses."""

import json
import os
import sys

import mlx.core as mx
import pytest

from mlx_kda.bench import model, op, results, timing
from mlx_kda.cli import measure
from mlx_kda.cli.main import main
from mlx_kda.errors import UserError
from mlx_kda.ops import reference64

QUICK = ["op", "--tokens", "3", "--heads", "1", "--dim", "8", "--samples", "3", "--budget", "0.5"]
ABOUT = {"command": "mlx-kda bench something"}


def test_candidates_take_turns_and_chain_their_calls():
    order = []
    timings = timing.interleave(
        {name: lambda n, name=name: order.append((name, n)) for name in "ab"}, samples=3, calls=4
    )
    assert order[-6:] == [("a", 4), ("b", 4)] * 3
    assert timings["a"].samples == 3 and timings["a"].calls == 4


def test_a_noisy_run_says_so():
    assert timing.Timing.of([1.0, 1.01, 1.02]).columns()["steady"]
    assert not timing.Timing.of([1.0, 1.2, 1.4]).columns()["steady"]


def test_op_rows_hold_time_and_error_of_every_candidate():
    rows = list(op.run([5], [2], dim=16, paths=["auto", "reference"], samples=3, budget=1))
    assert [r["candidate"] for r in rows] == ["ours (auto)", "ours (reference)", "mlx-lm"]
    for row in rows:
        assert row["ms"] > 0 and row["error"] < 2e-6 and row["calls"] >= 1


def test_the_error_column_sees_a_wrong_result():
    x = mx.ones((1, 3, 2, 4))
    assert op._error(x, 2 * x) == pytest.approx(0.5)


def test_launches_leave_out_views_and_count_copies():
    a, b = mx.random.normal((4, 8)), mx.random.normal((8, 4))
    mx.eval(a, b)
    c = (a @ b).transpose()[1:]
    counts = model.launches([mx.concatenate([c, c]) + 1.0])
    assert counts == {"Matmul": 1, "Concatenate": 2, "Add": 1}


def test_command_writes_csv_and_json_with_the_machine(tmp_path, capsys):
    assert main(["bench", *QUICK, "--out", str(tmp_path)]) == 0
    assert "| 1 | 3 | mlx-lm |" in capsys.readouterr().out
    document = results.load(tmp_path / "op.json")
    facts = {"chip", "cores", "system", "packages", "commit", "command", "date"}
    assert facts <= set(document["machine"])
    lines = (tmp_path / "op.csv").read_text().splitlines()
    assert len(lines) == 1 + len(document["rows"]) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["op.csv", "op.json"]


@pytest.mark.parametrize(
    "argv, word",
    [
        (["op", "--paths", "fast"], "--paths takes"),
        (["op", "--plot"], "give --out DIR too"),
        (["model", "nowhere"], "nowhere"),
        (["model"], "a model's folder or a --shape"),
        (["model", "--shape", "48b", "--runner", "fast", "--candidates=ours"], "unknown runner"),
    ],
)
def test_mistakes_end_with_one_line(argv, word, fails):
    fails(main(["bench", *argv]), word)


def test_the_inputs_to_choose_from_are_those_of_the_reference():
    assert tuple(reference64.ROWS) == measure.INPUTS


def test_plot_draws_both_formats(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["bench", *QUICK, "--out", str(tmp_path), "--plot"]) == 0
    assert (tmp_path / "op.svg").stat().st_size > 1000
    assert (tmp_path / "op.png").read_bytes()[:4] == b"\x89PNG"


def interrupted(*_, **__):
    yield {"candidate": "ours", "ms": 1.0}
    raise KeyboardInterrupt


def complete(*_, **__):
    yield from ({"candidate": name, "ms": 1.0} for name in ("ours", "mlx-lm"))


def test_an_interrupted_run_keeps_its_rows_and_does_not_look_complete(
    tmp_path, monkeypatch, capsys
):
    new = tmp_path / "new"
    partial = new / "op.partial.json"
    monkeypatch.setattr(sys, "argv", ["mlx-kda", "bench", "op", f"--out={new}"])
    for name in [name for name in os.environ if name.startswith("MLX_")]:
        monkeypatch.delenv(name)  # main sets MLX_ENABLE_TF32, which the user did not
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "9 0")
    monkeypatch.setenv("MLX_SOMETHING", "secret")

    monkeypatch.setattr(op, "run", interrupted)
    assert main(sys.argv[1:]) == 130
    assert f"rows so far: {partial}" in capsys.readouterr().err
    document = results.load(partial)
    command = "MLX_MAX_OPS_PER_BUFFER='9 0' mlx-kda bench op --out=new"
    assert document["machine"]["command"] == command
    assert document["rows"] == [{"candidate": "ours", "ms": 1.0}]
    assert document["complete"] is False and os.listdir(new) == [partial.name]

    monkeypatch.setattr(op, "run", complete)
    assert main(sys.argv[1:]) == 2  # it would overwrite what the other left
    assert f"{partial} holds the rows of an interrupted run" in capsys.readouterr().err
    assert os.listdir(new) == [partial.name]
    partial.unlink()
    assert main(sys.argv[1:]) == 0
    assert sorted(os.listdir(new)) == ["op.csv", "op.json"]
    assert len(results.load(new / "op.json")["rows"]) == 2


def test_a_complete_run_is_saved_though_its_table_cannot_be_printed(tmp_path, monkeypatch):
    """A closed pipe must not leave the partial file alone, every row in it."""

    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(op, "run", complete)
    monkeypatch.setattr(results, "markdown", closed)
    assert main(["bench", "op", "--out", str(tmp_path)]) == 141
    assert sorted(os.listdir(tmp_path)) == ["op.csv", "op.json"]


def test_a_second_run_into_one_folder_is_refused(tmp_path, monkeypatch, fails):
    """Two runs would overwrite each other's rows, and the first to end would remove them."""
    first = results.Saving(tmp_path, "op", lambda: ABOUT)
    first.add({"ms": 1.0})
    kept = first.path.read_bytes()
    monkeypatch.setattr(measure, "collect", lambda *_: pytest.fail("it measured"))
    status = main(["bench", "op", "--out", str(tmp_path)])
    fails(status, "another run of op is writing to")
    assert first.path.read_bytes() == kept
    other = results.Saving(tmp_path, "model", lambda: ABOUT)  # another benchmark is independent
    other.add({"ms": 2.0})
    first.add({"ms": 3.0})
    for saving in (first, other):
        saving.finish()
    rows = {name: results.load(tmp_path / f"{name}.json")["rows"] for name in ("op", "model")}
    assert rows == {"op": [{"ms": 1.0}, {"ms": 3.0}], "model": [{"ms": 2.0}]}
    assert sorted(os.listdir(tmp_path)) == ["model.csv", "model.json", "op.csv", "op.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_results_need_a_writable_folder(tmp_path, fails):
    tmp_path.chmod(0o555)
    fails(main(["bench", "op", "--out", str(tmp_path)]), "is not writable")


def test_results_need_a_folder_that_can_be_made(tmp_path, fails):
    (tmp_path / "file").write_text("")
    fails(main(["bench", "op", "--out", str(tmp_path / "file" / "x")]), "cannot make the folder")


@pytest.mark.parametrize(
    "document, told",
    [
        ("", "is not a benchmark's JSON"),
        ("[" * 100_000, "is not a benchmark's JSON"),
        ([], "benchmark is missing"),
        ({"benchmark": [], "machine": {}, "rows": [{}]}, "benchmark is missing or not a str"),
        ({"benchmark": "model", "machine": [], "rows": [{}]}, "machine is missing or not a dict"),
        ({"benchmark": "model", "machine": {}, "rows": "x"}, "rows is missing or not a list"),
        ({"benchmark": "model", "machine": {}, "rows": []}, "holds no rows"),
        ({"benchmark": "model", "machine": {}, "rows": [1]}, "holds no rows"),
    ],
)
def test_what_is_not_a_result_is_refused_in_a_line(tmp_path, document, told):
    path = tmp_path / "file.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(UserError, match=told):
        results.load(path)
