"""The benchmark command: what it writes, and what it refuses."""

import json

import mlx.core as mx
import pytest

from mlx_kda.bench import graph, op, results, timing
from mlx_kda.cli.main import main
from mlx_kda.errors import UserError


def test_candidates_take_turns_and_chain_their_calls():
    order = []
    timings = timing.interleave(
        {name: lambda n, name=name: order.append((name, n)) for name in "ab"}, samples=3, calls=4
    )
    assert order[-6:] == [("a", 4), ("b", 4)] * 3
    assert timings["a"].samples == 3 and timings["a"].calls == 4


def test_a_noisy_run_says_so():
    assert timing._timing([1.0, 1.01, 1.02], 1).steady
    assert not timing._timing([1.0, 1.2, 1.4], 1).steady


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
    counts = graph.launches([mx.concatenate([c, c]) + 1.0])
    assert counts == {"Matmul": 1, "Concatenate": 2, "Add": 1}


def test_command_writes_csv_and_json_with_the_machine(tmp_path, capsys):
    flags = ["--tokens", "3", "--heads", "1", "--dim", "8", "--samples", "3", "--budget", "0.5"]
    assert main(["bench", "op", *flags, "--out", str(tmp_path)]) == 0
    assert "| 1 | 3 | mlx-lm |" in capsys.readouterr().out
    document = json.loads((tmp_path / "op.json").read_text())
    assert {"chip", "cores", "system", "packages", "commit", "command", "date"} <= set(
        document["machine"]
    )
    lines = (tmp_path / "op.csv").read_text().splitlines()
    assert len(lines) == 1 + len(document["rows"]) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["op.csv", "op.json"]


@pytest.mark.parametrize(
    "argv,word",
    [
        (["op", "--row", "easy"], "--row is one of"),
        (["op", "--paths", "fast"], "--paths takes"),
        (["model", "nowhere"], "nowhere"),
        (["plot", "nowhere.json", "x"], "cannot read nowhere.json"),
    ],
)
def test_mistakes_end_with_one_line(argv, word, capsys):
    assert main(["bench", *argv]) == 2
    err = capsys.readouterr().err.strip()
    assert word in err and "\n" not in err


def test_a_file_that_is_no_benchmark_is_refused(tmp_path):
    for text in ("", "[]", '{"rows": []}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(UserError, match="not a benchmark's JSON"):
            results.load(tmp_path / "x.json")


def test_plot_draws_both_formats(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"candidate": c, "H": 4, "dtype": "float32", "T": T, "us_per_token": T * s}
        for c, s in (("ours", 1.0), ("mlx-lm", 2.0))
        for T in (1, 64)
    ]
    machine = {"chip": "chip", "device": "CPU", "date": "today"}
    results.save(tmp_path, "op", machine, rows)
    assert main(["bench", "plot", str(tmp_path / "op.json"), str(tmp_path / "picture")]) == 0
    assert (tmp_path / "picture.svg").stat().st_size > 1000
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
