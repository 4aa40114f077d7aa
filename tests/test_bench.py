"""The benchmark command: what it writes, and what it refuses."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from helpers.tiny import difference, tiny_config, tiny_model, tiny_weights, tokens, write_model
from mlx.utils import tree_flatten
from tolerances import STOCK

from mlx_kda.bench import (
    graph,
    op,
    profile,
    profile_tables,
    report,
    results,
    shapes,
    steps,
    timing,
)
from mlx_kda.bench import model as bench_model
from mlx_kda.bench.subject import Subject
from mlx_kda.cli.benchmarks import BENCHMARKS
from mlx_kda.cli.main import build_parser, main
from mlx_kda.errors import UserError
from mlx_kda.models.config import DENSE, MLA, MOE, KimiLinearConfig


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
    from mlx_kda import oracle
    from mlx_kda.cli.benchmarks.kernels import ROWS

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


@pytest.fixture(scope="module")
def profile_rows():
    model = tiny_model()
    return list(profile.run({"": model, "again": model}, tokens=20, decode=2, samples=3, budget=1))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_parts_of_a_profile_are_all_of_its_time(profile_rows, phase):
    rows = {row["part"]: row for row in profile_rows if row["phase"] == phase}
    parts = [row for name, row in rows.items() if name in profile.PARTS]
    # A tiny model has every kind of layer; what a KDA layer does to one token is one part.
    absent = {"prefill": {profile.STEP}, "decode": {profile.OP, profile.GATED}}[phase]
    assert [row["part"] for row in parts] == [p for p in profile.PARTS if p not in absent]
    assert all(row["ms"] > 0 and row["again ms"] > 0 for row in parts)
    # Medians are taken part by part, so they add up to that of the sum only roughly.
    share = sum(row["ms"] for row in parts) / rows[profile.SUM]["ms"]
    assert 1 / 3 < share < 3
    gap = rows[profile.SUM]["ms"] - rows[profile.WHOLE]["ms"]
    assert rows[profile.FORCING]["ms"] == pytest.approx(gap)


def test_a_profile_counts_the_inner_of_nested_parts_and_leaves_no_trace(monkeypatch):
    clock, model = profile.Clock(), tiny_model()
    ids = mx.array([[1, 2, 3]])
    want, untouched = model(ids), type(model.layers[0].self_attn).mix

    ticks = iter([1, 3, 10, 14])  # outer begins, inner begins, inner ends, outer ends
    with monkeypatch.context() as patched:
        patched.setattr(profile.time, "perf_counter", lambda: next(ticks))
        clock.measure("outer", lambda: clock.measure("inner", lambda: None))
    assert clock.seconds == {"outer": 2 + 4, "inner": 7}
    with profile.instrumented(model, clock):
        assert mx.array_equal(model(ids), want)
    assert type(model.layers[0].self_attn).mix is untouched
    assert clock.seconds["router"] > 0


def test_the_48b_shape_is_its_first_layers_and_the_rest_of_its_sizes():
    """27 layers as published, every fourth MLA and the last; a part of them keeps the widths."""
    whole = KimiLinearConfig.from_dict(shapes.config("48b"))
    assert [i + 1 for i, kind in enumerate(whole.layer_types) if kind == MLA] == [
        *(4, 8, 12, 16, 20, 24),
        27,
    ]
    assert whole.mlp_layer_types == (DENSE, *(MOE,) * 26)
    few = KimiLinearConfig.from_dict(shapes.config("48b", layers=5, vocab=512))
    assert few.layer_types == whole.layer_types[:5] and few.vocab_size == 512
    assert few.num_experts == whole.num_experts == 256 and few.hidden_size == 2304
    assert shapes.config("48b")["linear_attn_config"]["full_attn_layers"][-1] == 27


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
    fla = Path(__file__).parent / "goldens-fla" / "plain"
    files = ["--out", str(tmp_path), "--report", str(tmp_path / "page.md")]
    assert main(["bench", "constant", str(fla), "--text", str(tmp_path / "t"), *files]) == 1
    out, err = capsys.readouterr()
    assert "not kept: live arrays: 3 -> 4" in err and "| 2 | 10 | 4 |" in out
    page = (tmp_path / "page.md").read_text()
    assert "live arrays are the same in every row" in page and "> a" in page
    assert json.loads((tmp_path / "constant.json").read_text())["rows"][1]["arrays"] == 4
    assert (tmp_path / "constant.csv").read_text().startswith("tokens,")


def test_a_page_shows_prefill_beside_decode_and_names_the_largest_parts():
    def row(phase, part, ms, **more):
        return {"phase": phase, "tokens": 512, "part": part, "ms": ms, "share": ms / 8, **more}

    rows = [
        row("prefill", "router", 5.0, **{"as stored ms": 9.0}),
        row("prefill", "head", 2.0, **{"as stored ms": 4.0}),
        row("prefill", "norms", 1.0, **{"as stored ms": 1.0}),
        row("decode", "head", 6.0),
        row("decode", "router", 2.0),
    ]
    lines = profile_tables.table(rows).splitlines()
    assert lines[0].startswith("| part | prefill, ms | share | ms, weights as stored | decode, ms")
    assert lines[2:] == [
        "| norms | 1 | 12.5% | 1 |  |  |  |",
        "| router | 5 | 62.5% | 9 | 2 | 25.0% |  |",
        "| head | 2 | 25.0% | 4 | 6 | 75.0% |  |",
    ]
    told = profile_tables.largest(rows)
    assert "prefill goes to router (62%) and head (25%)" in told
    assert "from 9 to 5 ms and 4 to 2 ms" in told
    assert told.endswith("Most of a decode step goes to head (75%) and router (25%).")


def test_a_page_takes_the_profile_of_another_machine(tmp_path, profile_rows):
    about = {"chip": "H200", "device": "CUDA GPU", "cores": 16, "command": "mlx-kda bench profile"}
    results.save(tmp_path, "profile", about, profile_rows)
    page = report._recorded_profile(report._read([tmp_path / "profile.json"])["profile"][0])
    assert page.startswith("## Where the time goes: `mlx-kda bench profile`, CUDA GPU\n\nH200.")
    assert "| KDA recurrence |" in page and "A prefill of 20 tokens" in page
    results.save(tmp_path, "op", about, profile_rows)
    with pytest.raises(UserError, match="bench op: only those of cuda, model, profile are added"):
        report._read([tmp_path / "op.json"])


def test_a_candidate_too_slow_for_the_next_context_is_left_out(monkeypatch, tmp_path):
    rows = {"fast": 100.0, "slow": 10.0}

    def both(models, prompt, *_):
        for name in models:
            row = {"candidate": name, "context": prompt.size, "tokens_per_second": rows[name]}
            yield from ({**row, "phase": phase} for phase in ("prefill", "decode"))

    monkeypatch.setattr(bench_model, "_both_phases", both)
    models = dict.fromkeys(rows, tiny_model())
    found = list(bench_model.run(models, [10, 40, 41, 4000], budget=2.0))
    told = [(r["context"], r["candidate"]) for r in found if r["phase"] == "prefill"]
    assert told == [(10, "fast"), (10, "slow"), (40, "fast"), (40, "slow"), (41, "fast")]

    about = {"chip": "H200", "device": "CUDA GPU", "system": "Linux", "date": "today"}
    about |= {"cores": 16, "command": "mlx-kda bench model"}
    results.save(tmp_path, "model", about, found)
    page = report._recorded_model(report._read([tmp_path / "model.json"])["model"][0])
    assert page.startswith("### On another machine, CUDA GPU: `mlx-kda bench model`")
    assert "| 41 | prefill | fast |" in page and "| 41 | prefill | slow |" not in page


@pytest.mark.parametrize("q_bits", [None, 4])
def test_models_of_one_shape_are_run_side_by_side(monkeypatch, q_bits):
    monkeypatch.setitem(shapes.SHAPES, "48b", steps.CONFIG)
    options = {"layers": 4, "vocab": 64, "dtype": "float32", "q_bits": q_bits, "runner": "ops"}
    subject = Subject(shape="48b", **options)
    found = list(bench_model.of(subject, contexts=[8], samples=3, budget=1))
    assert [r["candidate"] for r in found] == ["ours", "mlx-lm"] * 2
    launches = {r["candidate"]: r["launches"] for r in found if r["phase"] == "decode"}
    assert launches["ours"] < launches["mlx-lm"]


def test_every_model_prefills_to_the_same_logits_and_ours_asks_for_fewer_launches(
    tmp_path, monkeypatch
):
    """mlx-lm leaves the head out until its last token, ours computes it for that one alone."""
    config = tiny_config()
    folder = write_model(tmp_path / "m", config, tiny_weights(config))
    subject, models = Subject(folder), {}
    monkeypatch.setattr(bench_model, "run", lambda given, **_: models.update(given) or [])
    list(bench_model.of(subject))
    monkeypatch.undo()
    assert list(models) == ["ours", "mlx-lm", "mlx-lm, our layout of weights"]
    prompt = tokens(24)
    want = models["ours"](prompt)[:, -1]
    for each in models.values():
        assert difference(bench_model._absorb(each, prompt, each.make_cache()), want) < STOCK

    rows = list(bench_model.run(models, [24], decode=2, samples=3, budget=1))
    assert [(r["phase"], r["candidate"]) for r in rows] == [
        (phase, name) for phase in ("prefill", "decode") for name in models
    ]
    launches = {r["candidate"]: r["launches"] for r in rows if r["phase"] == "decode"}
    assert launches["ours"] < 0.8 * launches["mlx-lm"]
    assert launches["mlx-lm"] == launches["mlx-lm, our layout of weights"]
    weights = sum(w.nbytes for _, w in tree_flatten(models["ours"].parameters())) / 1e6
    assert all(weights < r["peak_mb"] < 2 * weights + 10 for r in rows)


def test_a_stopped_run_keeps_its_rows_and_does_not_look_whole(tmp_path, monkeypatch, capsys):
    def rows(stop):
        yield {"candidate": "ours", "launches": 1}
        if stop:
            raise KeyboardInterrupt
        yield {"candidate": "mlx-lm", "launches": 2}

    def run(stop):
        kind = dataclasses.replace(BENCHMARKS["launches"], rows=lambda args: rows(stop))
        monkeypatch.setitem(BENCHMARKS, "launches", kind)
        monkeypatch.setattr(sys, "argv", ["mlx-kda", "bench", "launches", "--out", str(new)])
        for name in [name for name in os.environ if name.startswith("MLX_")]:
            monkeypatch.delenv(name)  # main sets MLX_ENABLE_TF32: not what the user told
        monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "9")
        monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/somewhere/ptx")
        return main(sys.argv[1:])

    new = tmp_path / "new"
    partial = new / "launches.partial.json"
    assert run(stop=True) == 130
    assert f"rows until then: {partial}" in capsys.readouterr().err
    document = results.load(partial)
    command = "MLX_MAX_OPS_PER_BUFFER=9 MLX_PTX_CACHE_DIR=ptx mlx-kda bench launches --out new"
    assert document["machine"]["command"] == command
    assert document["rows"] == [{"candidate": "ours", "launches": 1}]
    assert document["complete"] is False and [p.name for p in partial.parent.iterdir()] == [
        partial.name
    ]
    assert "stopped before its end" in report._recorded_model({**document, "benchmark": "model"})

    assert run(stop=False) == 0
    assert sorted(p.name for p in partial.parent.iterdir()) == ["launches.csv", "launches.json"]
    assert len(results.load(tmp_path / "new" / "launches.json")["rows"]) == 2


def test_results_need_a_folder_that_can_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["bench", "launches", "--out", str(tmp_path / "file" / "x")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, told",
    [
        (["--model", "nowhere"], "nowhere"),
        (["--source", "nowhere"], "nowhere"),
        (["--recorded", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_a_page_checks_its_arguments_before_it_measures(monkeypatch, capsys, tmp_path, argv, told):
    monkeypatch.setattr("mlx_kda.cli.bench.run_one", lambda *_: pytest.fail("measured first"))
    assert main(["bench", "all", "--report", str(tmp_path / "page.md"), *argv]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
