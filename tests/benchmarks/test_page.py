"""The page of `bench all`, and what it takes from other machines."""

import json

import pytest
from helpers.tiny import tiny_config, tiny_model, tiny_weights, write_model

from mlx_kda.bench import profile, results
from mlx_kda.cli.benchmarks import BENCHMARKS, page
from mlx_kda.cli.main import main
from mlx_kda.cli.measure import run_one
from mlx_kda.errors import UserError

ABOUT = {"chip": "H200", "device": "CUDA GPU", "cores": 16, "system": "Linux", "packages": {}}
ABOUT |= {"date": "today", "command": "mlx-kda bench something"}


@pytest.fixture(scope="module")
def profile_rows():
    return list(profile.run({"": tiny_model()}, tokens=20, decode=2, samples=3, budget=1))


def rows_of(name, profile_rows):
    return profile_rows if name == "profile" else [{"candidate": "ours", "spread": 0.2}]


def test_a_page_asks_every_benchmark_as_its_command_would(monkeypatch, tmp_path, profile_rows):
    """An option added to a kind and not to the page used to end it, after minutes."""
    config = tiny_config()
    folder = write_model(tmp_path / "m", config, tiny_weights(config))
    asked = []

    def measured(benchmark, options):
        benchmark.rows(options)  # made, not run
        asked.append(benchmark.name)
        return rows_of(benchmark.name, profile_rows)

    monkeypatch.setattr("mlx_kda.cli.measure.run_one", measured)
    path = tmp_path / "page.md"
    command = [
        "bench",
        "all",
        "--report",
        str(path),
        "--model",
        str(folder),
        "--source",
        str(folder),
    ]
    assert main(command) == 0
    assert asked == ["op", "model", "profile", "convert", "launches", "counters"]
    text = path.read_text()
    assert "## Where the time goes: m, CPU" in text  # of a path its name alone
    assert str(tmp_path) not in text
    assert "1 of 1 rows spread over more than 5 %" in text

    gpu = page._plan(main_arguments(path), str(folder), "Metal GPU")
    options = page._options(BENCHMARKS["buffers"], gpu["buffers"])
    assert (options.context, options.rounds, options.samples) == (1024, 3, 3)


def main_arguments(path):
    from mlx_kda.cli.main import build_parser

    return build_parser().parse_args(["bench", "all", "--report", str(path)])


def test_a_page_that_is_stopped_leaves_what_there_is(monkeypatch, tmp_path, capsys, profile_rows):
    config = tiny_config()
    folder = write_model(tmp_path / "m", config, tiny_weights(config))

    def measured(benchmark, options):
        if benchmark.name == "profile":
            raise KeyboardInterrupt
        return rows_of(benchmark.name, profile_rows)

    monkeypatch.setattr("mlx_kda.cli.measure.run_one", measured)
    path, partial = tmp_path / "page.md", tmp_path / "page.partial.md"
    command = ["bench", "all", "--report", str(path), "--model", str(folder)]
    assert main(command) == 130
    assert f"what there is: {partial}" in capsys.readouterr().err and not path.exists()
    assert partial.read_text().endswith("The run was stopped before its end.\n")


@pytest.mark.parametrize(
    "argv, told",
    [
        (["--model", "nowhere"], "nowhere"),
        (["--source", "nowhere"], "nowhere"),
        (["--recorded", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_a_page_checks_its_arguments_before_it_measures(monkeypatch, capsys, tmp_path, argv, told):
    monkeypatch.setattr("mlx_kda.cli.measure.run_one", lambda *_: pytest.fail("measured first"))
    assert main(["bench", "all", "--report", str(tmp_path / "page.md"), *argv]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_page_takes_what_other_machines_measured(tmp_path, profile_rows):
    results.save(tmp_path, "profile", ABOUT, profile_rows)
    model = {"candidate": "ours", "phase": "prefill", "context": 41, "ms": 1.0, "spread": 0.01}
    saving = results.Saving(tmp_path, "model", lambda: ABOUT)
    saving.add(model)
    found = page._recorded([tmp_path / "profile.json", saving.path])
    (section,) = found["profile"]
    assert section.startswith("## Where the time goes: on another machine, today: `mlx-kda bench")
    assert "| KDA recurrence |" in section and "A prefill of 20 tokens" in section
    (section,) = found["model"]
    assert section.startswith("### On another machine, CUDA GPU: `mlx-kda bench something`")
    assert "| 41 | prefill | ours |" in section and "stopped before its end" in section


@pytest.mark.parametrize(
    "document, told",
    [
        ("", "is not a benchmark's JSON"),
        ("[" * 100_000, "is not a benchmark's JSON"),
        ([], "benchmark is missing"),
        ({"benchmark": [], "machine": {}, "rows": [{}]}, "benchmark is missing or no str"),
        ({"benchmark": "model", "machine": [], "rows": [{}]}, "machine is missing or no dict"),
        ({"benchmark": "model", "machine": ABOUT, "rows": "x"}, "rows is missing or no list"),
        ({"benchmark": "model", "machine": ABOUT, "rows": []}, "holds no rows"),
        ({"benchmark": "model", "machine": ABOUT, "rows": [1]}, "holds no rows"),
        ({"benchmark": "op", "machine": ABOUT, "rows": [{}]}, "only those of cuda, model, profile"),
        (
            {"benchmark": "profile", "machine": ABOUT, "rows": [{}]},
            "lacks what bench profile saves",
        ),
        ({"benchmark": "cuda", "machine": ABOUT, "rows": [{"row": "x"}]}, "lacks what bench cuda"),
        ({"benchmark": "model", "machine": {}, "rows": [{}]}, "lacks what bench model saves"),
        (
            {"benchmark": "model", "machine": ABOUT, "rows": [{}], "note": 5},
            "lacks what bench model",
        ),
    ],
)
def test_what_is_no_whole_result_is_refused_in_a_line(tmp_path, document, told):
    path = tmp_path / "file.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(UserError, match=told):
        page._recorded([path])


def test_rows_are_told_and_kept_as_they_come(capsys):
    kept = []
    given = BENCHMARKS["launches"].__class__(
        "x", "x", {"a": "a"}, lambda _: None, lambda _: iter([{"a": 1, "spread": 0.06}, {"a": 2}])
    )
    assert run_one(given, None, kept.append) == kept == [{"a": 1, "spread": 0.06}, {"a": 2}]
    assert "1 of 2 rows spread over more than 5 %" in capsys.readouterr().err
