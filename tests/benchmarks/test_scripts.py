"""The scripts in benchmarks/ that run here in seconds."""

import json
import subprocess
import sys

import common
import constant
import conversion
import counters
import endurance
import memory
import mlx.core as mx
import numpy as np
import profile_model
import pytest
from helpers.paths import FLA_GOLDENS, ROOT
from helpers.tiny import tiny_model
from profile_model import GATED, MIX, OP, STEP

from mlx_kda.errors import UserError

SCRIPTS = sorted(
    path for path in (ROOT / "benchmarks").glob("*.py") if "sys.exit(run(" in path.read_text()
)
KEYS = ("device_bytes", "unique_bytes", "alu", "l1", "threadgroup", "lower", "upper")


def run(script, *argv):
    return common.run(script.__doc__, script.add_arguments, script.main, argv)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_starts(path):
    subprocess.run([sys.executable, path, "--help"], check=True, capture_output=True)


def test_counters_print_a_json_list(capsys):
    """With what other programs read: each kernel's counts and cycles, per token and head."""
    assert run(counters, "--json", "--dim", "64", "--tokens", "32") == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert err == "" and len(rows) == 12
    for row in rows:
        assert row["Dk"] == row["Dv"] == 64 and isinstance(row["kernel"], str)
        cycles = [row[key] for key in ("alu", "l1", "threadgroup")]
        assert row["lower"] == max(cycles) and row["upper"] == sum(cycles)
        assert all(isinstance(row[key], float) for key in KEYS)
        assert row["l1"] == row["device_bytes"] / 64
    for i, mode in ((0, "exact"), (3, "half")):
        whole, *launches = rows[i : i + 3]
        names = [(row["kernel"], row["mode"]) for row in (whole, *launches)]
        assert names == [(f"kda_chunk{part}", mode) for part in ("", "_prepare", "_scan")]
        for key in set(KEYS) - {"lower"}:
            assert whole[key] == pytest.approx(sum(row[key] for row in launches))
    found = {row["kernel"]: row for row in rows}
    ours, theirs = found["kda_chunk"], found["mlx-lm gated_delta_step_vec"]
    assert ours["mma"] > 0 and theirs["mma"] == 0 and theirs["simd_sums"] == 2 * 64
    assert ours["device_bytes"] < theirs["device_bytes"] / 4


def test_a_bound_that_is_exceeded_is_reported_and_ends_with_1(tmp_path, monkeypatch, capsys):
    row = {"tokens": 1, "cache_bytes": 10, "arrays": 3, "active_mb": 1.0, "mlx_peak_mb": 2.0}
    row |= {"resident_mb": 50.0, "peak_mb": 51.0, "tokens_per_second": 9.0}
    rows = [row, {**row, "tokens": 2, "arrays": 4, "model": "m", "answer": "a"}]
    monkeypatch.setattr(constant, "rows", lambda *_: iter(rows))
    text, page = tmp_path / "t", tmp_path / "page.md"
    text.write_text("text")
    files = ["--text", str(text), "--out", str(tmp_path), "--report", str(page)]
    assert run(constant, str(FLA_GOLDENS / "plain"), *files) == 1
    out, err = capsys.readouterr()
    assert "bound exceeded: live arrays: 3 -> 4" in err and "| 2 | 10 | 4 |" in out
    assert "live arrays are the same in every row" in page.read_text()
    assert page.read_text().endswith("\n> a\n")
    assert json.loads((tmp_path / "constant.json").read_text())["rows"][1]["arrays"] == 4
    assert (tmp_path / "constant.csv").read_text().startswith("tokens,")


def test_the_peak_of_a_conversion_is_not_that_of_its_parent():
    """On Linux ru_maxrss of a child is at least its parent's."""
    held = np.ones(50_000_000)  # 400 MB
    _, peak = conversion.timed_process(["platform"])
    assert 5e6 < peak < 200e6 < held.nbytes
    with pytest.raises(UserError, match="exit status 2: .*: error: "):
        conversion.timed_process(["json.tool", "--nonsense"])


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_parts_of_a_profile_are_all_of_its_time(profiled, phase):
    rows = {row["part"]: row for row in profiled if row["phase"] == phase}
    parts = [row for name, row in rows.items() if name in profile_model.PARTS]
    # A tiny model has every kind of layer; what a KDA layer does to one token is one part.
    absent = {"prefill": {STEP}, "decode": {MIX, OP, GATED}}[phase]
    assert [row["part"] for row in parts] == [p for p in profile_model.PARTS if p not in absent]
    assert all(row["ms"] > 0 and row["again ms"] > 0 for row in parts)
    # Medians are taken part by part, so they add up to that of the sum only roughly.
    share = sum(row["ms"] for row in parts) / rows[profile_model.SUM]["ms"]
    assert 1 / 3 < share < 3
    gap = rows[profile_model.SUM]["ms"] - rows[profile_model.WHOLE]["ms"]
    assert rows[profile_model.FORCING]["ms"] == pytest.approx(gap)


def test_a_profile_counts_the_inner_of_nested_parts_and_leaves_no_trace(monkeypatch):
    clock, model = profile_model.Clock(), tiny_model()
    ids = mx.array([[1, 2, 3]])
    want, untouched = model(ids), type(model.layers[0].self_attn).project

    ticks = iter([1, 3, 10, 14])  # outer begins, inner begins, inner ends, outer ends
    with monkeypatch.context() as patched:
        patched.setattr(profile_model.time, "perf_counter", lambda: next(ticks))
        clock.measure("outer", lambda: clock.measure("inner", lambda: None))
    assert clock.seconds == {"outer": 2 + 4, "inner": 7}
    with profile_model.instrumented(model, clock):
        assert mx.array_equal(model(ids), want)
    assert type(model.layers[0].self_attn).project is untouched
    assert clock.seconds["router"] > 0


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
    lines = profile_model.table(rows).splitlines()
    assert lines[0].startswith("| part | prefill, ms | share | ms, weights as stored | decode, ms")
    assert lines[2:] == [
        "| norms | 1 | 12.5% | 1 |  |  |  |",
        "| router | 5 | 62.5% | 9 | 2 | 25.0% |  |",
        "| head | 2 | 25.0% | 4 | 6 | 75.0% |  |",
    ]
    told = profile_model.largest(rows)
    assert "The largest parts of a prefill: router (62%) and head (25%)" in told
    assert "took router from 9 to 5 ms and head from 4 to 2 ms." in told
    assert told.endswith("The largest parts of a decode step: head (75%) and router (25%).")
    slower = [{**r, "as stored ms": 1.0} for r in rows if r["phase"] == "prefill"]
    assert "layout" not in profile_model.largest(slower + rows[3:])


@pytest.mark.parametrize("policy", ["window:64+8", "window:64,int8"])
def test_decoding_keeps_memory_flat(policy):
    """After the window is full no array, no byte of MLX's and no cache byte is added."""
    rows = list(endurance.decode(1200, every=300, policy=policy, layers=4))
    first, *rest = rows
    assert len(rest) == 3
    for row in rest:
        assert row["arrays"] == first["arrays"] and row["cache_mb"] == first["cache_mb"]
        assert row["active_mb"] <= first["active_mb"] + 0.1
        assert row["resident_mb"] <= first["resident_mb"] + 4


def test_a_leak_would_show():
    """The count of live arrays sees one that is kept at every step."""
    before, kept = memory.live_arrays(), []
    for _ in range(5):
        kept.append(mx.zeros((1,)))
    assert memory.live_arrays() == before + len(kept)


def test_a_prompt_through_a_window_ends_with_the_peak_of_a_shorter_one():
    short, long = endurance.prompts([5_000, 9_000], policy="window:512+16", layers=4)
    assert long["cache_mb"] == short["cache_mb"]
    assert long["mlx_peak_mb"] < 1.02 * short["mlx_peak_mb"]
    # without a window the latents of the longer prompt would show
    exact = next(iter(endurance.prompts([9_000], policy="exact", layers=4)))
    assert exact["cache_mb"] > 3 * long["cache_mb"]
