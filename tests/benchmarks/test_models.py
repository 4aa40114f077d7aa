"""Benchmarks of whole models: what they run, and what they tell."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.tiny import difference, tiny_config, tiny_model, tiny_weights, tokens, write_model
from mlx.utils import tree_flatten
from tolerances import STOCK

from mlx_kda.bench import buffers, conversion, profile, profile_tables, shapes, steps
from mlx_kda.bench import model as bench_model
from mlx_kda.bench.subject import Subject
from mlx_kda.errors import UserError
from mlx_kda.layers import blas_layout
from mlx_kda.models.hybrid_config import DENSE, MLA, MOE
from mlx_kda.models.kimi_linear import KimiLinearConfig
from mlx_kda.plan import MachineMemory


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
    assert "The largest parts of a prefill: router (62%) and head (25%)" in told
    assert "took router from 9 to 5 ms and head from 4 to 2 ms." in told
    assert told.endswith("The largest parts of a decode step: head (75%) and router (25%).")
    slower = [{**r, "as stored ms": 1.0} for r in rows if r["phase"] == "prefill"]
    assert "layout" not in profile_tables.largest(slower + rows[3:])


def test_a_candidate_too_slow_for_the_next_context_is_left_out(monkeypatch):
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


@pytest.mark.parametrize("q_bits", [None, 4])
def test_models_of_one_shape_are_run_side_by_side(monkeypatch, q_bits):
    monkeypatch.setitem(shapes.SHAPES, "48b", steps.CONFIG)
    options = {"layers": 4, "vocab": 64, "dtype": "float32", "q_bits": q_bits, "runner": "ops"}
    subject = Subject(shape="48b", **options)
    found = list(bench_model.of(subject, contexts=[8], samples=3, budget=1))
    assert [r["candidate"] for r in found] == ["ours", "mlx-lm"] * 2
    assert all(r["launches"] > 0 for r in found if r["phase"] == "decode")


def test_what_memory_does_not_hold_twice_is_measured_by_one_and_then_the_other(monkeypatch):
    """A 48B model on a Mac that holds one of it: both used to be loaded."""
    monkeypatch.setitem(shapes.SHAPES, "48b", steps.CONFIG)
    subject = Subject(shape="48b", layers=4, vocab=64, dtype="float32", runner="ops")
    alive = []

    def run(models, **_):
        alive.append(sorted(models))
        yield {"candidate": next(iter(models))}

    monkeypatch.setattr(bench_model, "run", run)
    weights = bench_model._weights(subject.ours())
    for factor, seen, told in (
        (3, [["mlx-lm", "ours"]], ["ours"]),
        (1.5, [["ours"], ["mlx-lm"]], ["ours (alone)", "mlx-lm (alone)"]),
    ):
        alive.clear()
        usable = MachineMemory(10**12, int(factor * weights), "a test")
        monkeypatch.setattr(bench_model, "machine", lambda usable=usable: usable)
        assert [row["candidate"] for row in bench_model.of(subject)] == told and alive == seen
    alive.clear()
    monkeypatch.undo()
    monkeypatch.setitem(shapes.SHAPES, "48b", steps.CONFIG)
    monkeypatch.setattr(bench_model, "run", run)
    assert len(list(bench_model.of(subject, ["mlx-lm"]))) == 1 and alive == [["mlx-lm"]]


def test_settings_of_command_buffers_take_turns(monkeypatch):
    turns = []

    def measured(arguments, setting):
        turns.append(setting.get(buffers.NUMBERS))
        row = {"context": 8, "tokens_per_second": 1.0, "spread": 0.0, "peak_mb": len(turns)}
        yield from ({**row, "phase": phase, "ms": len(turns)} for phase in ("prefill", "decode"))

    monkeypatch.setattr(buffers, "_measured", measured)
    rows = list(buffers.run([], rounds=3))
    assert turns == [None, "400", "2000"] * 3
    assert [(r["candidate"], r["phase"], r["ms"], r["peak_mb"]) for r in rows[:3]] == [
        ("MLX's own", "prefill", 4, 7),
        ("MLX's own", "decode", 4, 7),
        ("1000, 400", "prefill", 5, 8),
    ]
    assert not rows[0]["steady"]

    turns.clear()
    monkeypatch.setattr(buffers, "_measured", lambda *a: stop() if len(turns) > 3 else measured(*a))

    def stop():
        raise KeyboardInterrupt

    told = []  # what was measured until it was stopped
    with pytest.raises(KeyboardInterrupt):
        for row in buffers.run([], rounds=3):
            told.append(row["samples"])
    assert told == [2, 2, 1, 1, 1, 1]


def test_command_buffers_are_those_of_a_process_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv(buffers.OPS, "7")
    assert buffers.OPS not in buffers._environment({})
    assert buffers._environment({buffers.OPS: "9"})[buffers.OPS] == "9"
    config = tiny_config()
    folder = write_model(tmp_path / "m", config, tiny_weights(config))
    options = ["--contexts=8", "--samples=3", "--budget=0.1"]
    rows = buffers._measured([str(folder), *options], {})
    assert [(r["candidate"], r["phase"]) for r in rows] == [("ours", "prefill"), ("ours", "decode")]
    with pytest.raises(UserError, match="bench model ended with status 2: mlx-kda: "):
        buffers._measured([str(tmp_path / "nowhere")], {})


@pytest.mark.parametrize(
    "options, told",
    [
        ({"folder": "m", "shape": "48b"}, "one of the two"),
        ({"folder": "m", "layers": 4}, "--layers belongs to --shape"),
        ({"folder": "m", "q_bits": 4}, "--q-bits belongs to --shape"),
        ({"folder": "m", "dtype": "float32"}, "--dtype belongs to --shape"),
        ({"shape": "48b", "layers": 28}, "48b has 27"),
        ({"shape": "48b", "layers": 3, "dtype": "float32"}, "--layers 4 or more"),
    ],
)
def test_what_cannot_be_run_is_refused_before_it_is_made(options, told):
    with pytest.raises(UserError, match=told):
        Subject(**options).prepare(stock=True)


def test_16_bit_experts_are_refused_where_mlx_lm_cannot_run_them(tmp_path):
    """They ended in a RuntimeError of MLX after both models had been built."""
    assert mx.default_device() == mx.cpu
    with pytest.raises(UserError, match="cannot run 16-bit experts on a CPU"):
        Subject(shape="48b").prepare(stock=True)
    Subject(shape="48b").prepare()
    Subject(shape="48b", q_bits=4).prepare(stock=True)
    config = tiny_config()
    weights = {name: w.astype(mx.bfloat16) for name, w in tiny_weights(config).items()}
    folder = write_model(tmp_path / "m", config, weights)
    with pytest.raises(UserError, match="cannot run 16-bit experts on a CPU"):
        Subject(folder).stock()


def test_the_peak_of_a_conversion_is_not_that_of_who_measures_it():
    """ru_maxrss of a child on Linux is at least its parent's: a page showed 302 MB twice."""
    held = np.ones(50_000_000)  # 400 MB
    _, peak = conversion._measure(["platform"])
    assert 5e6 < peak < 200e6 < held.nbytes
    with pytest.raises(UserError, match="exit status 2: .*: error: "):
        conversion._measure(["json.tool", "--nonsense"])


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
    layouts = ["mlx-lm, our layout of weights"] if blas_layout.applies() else []
    assert list(models) == ["ours", "mlx-lm", *layouts]
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
    assert all(launches["mlx-lm"] == launches[name] for name in layouts)
    weights = sum(w.nbytes for _, w in tree_flatten(models["ours"].parameters())) / 1e6
    assert all(weights < r["peak_mb"] < 2 * weights + 10 for r in rows)
