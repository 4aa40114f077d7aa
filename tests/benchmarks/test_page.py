"""The pages of `mlx-kda bench all` and of benchmarks/page.py."""

import common
import conversion
import counters
import launches
import page
import profile_model
import pytest

from mlx_kda.bench import results
from mlx_kda.cli import measure
from mlx_kda.cli.main import main
from mlx_kda.errors import UserError

ABOUT = {"chip": "H200", "device": "CUDA GPU", "cores": 16, "system": "Linux", "packages": {}}
ABOUT |= {"date": "today", "command": "mlx-kda bench something"}


def script(*argv):
    return common.run(None, page.add_arguments, page.main, argv)


def package(*argv):
    return main(["bench", "all", *argv])


BOTH = pytest.mark.parametrize("write", [package, script])


@pytest.fixture
def collected(monkeypatch, profiled):
    """Nothing is measured: names of the benchmarks that were asked for, which get a row each."""
    asked, stop = [], []

    def collect(benchmark, rows, keep=None):
        if benchmark.name in stop:
            raise KeyboardInterrupt
        asked.append(benchmark.name)
        if benchmark.name == "profile":
            return profiled
        return [{"candidate": "ours", "kernel": "kda_chunk", "mode": "exact", "lower": 1.0,
                 "upper": 2.0, "spread": 0.2}]  # fmt: skip

    monkeypatch.setattr(measure, "collect", collect)
    monkeypatch.setattr(page, "collect", collect)
    return asked, stop


@BOTH
def test_a_page_has_a_section_for_each_benchmark(write, collected, tmp_path, folder):
    path = tmp_path / "page.md"
    assert write("--report", str(path), "--model", str(folder)) == 0
    text = path.read_text()
    wanted = ["op", "model"]
    if write is script:
        others = (profile_model, conversion, launches, counters)
        wanted += [each.BENCHMARK.name for each in others]
        assert "## Where the time goes: m, CPU" in text  # of a path only the name
        assert "| M1 Max | kda_chunk exact |" in text
    assert collected[0] == wanted
    assert "## Prefill and decode of a model against mlx-lm's class\n\n| context |" in text
    assert str(tmp_path) not in text and str(folder) not in text
    assert "1 of 1 rows have a spread of more than 5 %" in text


@BOTH
def test_an_interrupted_page_leaves_its_sections(write, collected, tmp_path, folder, capsys):
    collected[1].append("model")
    path, partial = tmp_path / "page.md", tmp_path / "page.partial.md"
    assert write("--report", str(path), "--model", str(folder)) == 130
    assert f"measured so far: {partial}" in capsys.readouterr().err and not path.exists()
    assert "## The op's paths" in partial.read_text()
    assert partial.read_text().endswith("The run was stopped before its end.\n")


@pytest.mark.parametrize(
    "write, argv, told",
    [
        (package, ["--model", "nowhere"], "nowhere"),
        (script, ["--model", "nowhere"], "nowhere"),
        (script, ["--source", "nowhere"], "nowhere"),
        (script, ["--recorded", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_a_page_checks_its_arguments_first(write, argv, told, collected, tmp_path, capsys):
    assert write("--report", str(tmp_path / "page.md"), *argv) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir()) and not collected[0]


def test_a_page_takes_what_other_machines_measured(tmp_path, profiled):
    results.save(tmp_path, "profile", ABOUT, profiled)
    row = {"candidate": "ours", "phase": "prefill", "context": 41, "ms": 1.0, "spread": 0.01}
    saving = results.Saving(tmp_path, "model", lambda: ABOUT)
    saving.add(row)
    found = page.read_recorded([tmp_path / "profile.json", saving.path])
    (section,) = found["profile"]
    assert section.startswith("## Where the time goes: on another machine, today: `mlx-kda bench")
    assert "| KDA recurrence |" in section and "A prefill of 20 tokens" in section
    (section,) = found["model"]
    assert section.startswith("### On another machine, CUDA GPU: `mlx-kda bench something`")
    assert "| 41 | prefill | ours |" in section and "stopped before its end" in section


@pytest.mark.parametrize(
    "name, machine, row, more, told",
    [
        ("op", ABOUT, {}, {}, "only those of cuda, model, profile"),
        ("profile", ABOUT, {}, {}, "lacks what profile saves"),
        ("cuda", ABOUT, {"row": "x"}, {}, "lacks what cuda saves"),
        ("model", {}, {}, {}, "lacks what model saves"),
        ("model", ABOUT, {}, {"note": 5}, "lacks what model saves"),
    ],
)
def test_an_incomplete_result_is_refused(monkeypatch, name, machine, row, more, told):
    document = {"benchmark": name, "machine": machine, "rows": [row], **more}
    monkeypatch.setattr(results, "load", lambda path: document)
    with pytest.raises(UserError, match=told):
        page.read_recorded(["file.json"])


def test_the_recorded_sections_of_the_published_page_are_what_their_files_make():
    docs = page.Path(page.__file__).parent.parent / "docs"
    published = (docs / "benchmarks.md").read_text()
    for sections in page.read_recorded(sorted((docs / "results").glob("*.json"))).values():
        assert all(section in published for section in sections)
