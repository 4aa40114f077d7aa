"""The benchmark command: what it writes, and what it refuses."""

import contextlib
import dataclasses
import json
import os
import sys

import mlx.core as mx
import pytest
from helpers.paths import FLA_GOLDENS

from mlx_kda.bench import graph, op, results, timing
from mlx_kda.cli.benchmarks import BENCHMARKS
from mlx_kda.cli.main import build_parser, main
from mlx_kda.cli.measure import _run
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
        (["op", "--paths", "fast"], "--paths takes"),
        (["model", "nowhere"], "nowhere"),
        (["profile"], "a model's folder or a --shape"),
        (["model"], "a model's folder or a --shape"),
        (["model", "--shape", "48b", "--layers", "3"], "--layers 4 or more"),
        (["profile", ".", "--shape", "48b"], "a model's folder or a --shape"),
        (["profile", "nowhere"], "nowhere"),
        (["profile", "--shape", "48b", "--runner", "fast"], "unknown runner"),
        (["plot", "nowhere.json", "x"], "cannot read nowhere.json"),
    ],
)
def test_mistakes_end_with_one_line(argv, word, capsys):
    assert main(["bench", *argv]) == 2
    err = capsys.readouterr().err.strip()
    assert word in err and "\n" not in err


def test_the_rows_to_choose_from_are_the_oracle_s():
    from mlx_kda.cli.benchmarks.kernels import ROWS
    from mlx_kda.ops import reference64 as oracle

    assert tuple(oracle.ROWS) == ROWS


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


def test_constant_and_streaming_are_kinds_of_bench(capsys):
    """They used to be programs of their own, with other options."""
    for kind, needed in (("constant", ["m", "--text", "t"]), ("streaming", ["f"])):
        args = build_parser().parse_args(["bench", kind, *needed, "--out", "o", "--report", "r"])
        assert (args.kind, args.out, args.report) == (kind, "o", "r")


def test_a_promise_that_is_not_kept_is_told_and_ends_with_1(tmp_path, monkeypatch, capsys):
    from mlx_kda.bench import constant

    row = {"tokens": 1, "cache_bytes": 10, "arrays": 3, "active_mb": 1.0, "mlx_peak_mb": 2.0}
    row |= {"resident_mb": 50.0, "peak_mb": 51.0, "tokens_per_second": 9.0}
    rows = [row, {**row, "tokens": 2, "arrays": 4, "model": "m", "answer": "a"}]
    monkeypatch.setattr(constant, "run", lambda *_: iter(rows))
    (tmp_path / "t").write_text("text")
    fla = FLA_GOLDENS / "plain"
    files = ["--out", str(tmp_path), "--report", str(tmp_path / "page.md")]
    assert main(["bench", "constant", str(fla), "--text", str(tmp_path / "t"), *files]) == 1
    out, err = capsys.readouterr()
    assert "not kept: live arrays: 3 -> 4" in err and "| 2 | 10 | 4 |" in out
    page = (tmp_path / "page.md").read_text()
    assert "live arrays are the same in every row" in page and "> a" in page
    assert json.loads((tmp_path / "constant.json").read_text())["rows"][1]["arrays"] == 4
    assert (tmp_path / "constant.csv").read_text().startswith("tokens,")


def test_a_stopped_run_keeps_its_rows_and_does_not_look_whole(tmp_path, monkeypatch, capsys):
    def rows(stop):
        yield {"candidate": "ours", "launches": 1}
        if stop:
            raise KeyboardInterrupt
        yield {"candidate": "mlx-lm", "launches": 2}

    def run(stop):
        kind = dataclasses.replace(BENCHMARKS["launches"], rows=lambda args: rows(stop))
        monkeypatch.setitem(BENCHMARKS, "launches", kind)
        monkeypatch.setattr(sys, "argv", ["mlx-kda", "bench", "launches", f"--out={new}"])
        for name in [name for name in os.environ if name.startswith("MLX_")]:
            monkeypatch.delenv(name)  # main sets MLX_ENABLE_TF32: not what the user told
        monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "9 0")
        monkeypatch.setenv("MLX_SOMETHING", "secret")
        return main(sys.argv[1:])

    new = tmp_path / "new"
    partial = new / "launches.partial.json"
    assert run(stop=True) == 130
    assert f"rows until then: {partial}" in capsys.readouterr().err
    document = results.load(partial)
    command = "MLX_MAX_OPS_PER_BUFFER='9 0' mlx-kda bench launches --out=new"
    assert document["machine"]["command"] == command
    assert document["rows"] == [{"candidate": "ours", "launches": 1}]
    assert document["complete"] is False and [p.name for p in partial.parent.iterdir()] == [
        partial.name
    ]

    assert run(stop=False) == 2  # it would overwrite what the other left
    assert f"{partial} holds the rows of a run that was stopped" in capsys.readouterr().err
    partial.unlink()
    assert run(stop=False) == 0
    assert sorted(p.name for p in partial.parent.iterdir()) == ["launches.csv", "launches.json"]
    assert len(results.load(tmp_path / "new" / "launches.json")["rows"]) == 2


def test_a_whole_run_is_whole_though_nobody_reads_its_table(tmp_path, monkeypatch):
    """A closed pipe used to leave the partial file alone, every row in it."""
    kind = dataclasses.replace(BENCHMARKS["launches"], rows=lambda args: iter([{"launches": 1}]))
    monkeypatch.setitem(BENCHMARKS, "launches", kind)

    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(results, "markdown", closed)
    with contextlib.suppress(BrokenPipeError):
        _run(build_parser().parse_args(["bench", "launches", "--out", str(tmp_path)]))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["launches.csv", "launches.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_results_need_a_folder_that_can_be_written(tmp_path, capsys):
    tmp_path.chmod(0o555)
    assert main(["bench", "launches", "--out", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_results_need_a_folder_that_can_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["bench", "launches", "--out", str(tmp_path / "file" / "x")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err
