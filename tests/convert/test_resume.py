"""Conversions that were interrupted are resumed, and their files are those of one run."""

import json
import signal
import time
from pathlib import Path

import pytest
from helpers.checkpoints import files_of
from helpers.paused import Pause, started, wait_for
from helpers.program import run
from helpers.tiny_checkpoint import write_checkpoint

from mlx_kda.convert import bit_budget, conversion, convert
from mlx_kda.errors import UserError
from mlx_kda.weights import safetensors_writer

SIZE = 22_000
OPTIONS = {"q_bits": 4, "q_group_size": 32, "shard_bytes": SIZE}


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The files of a conversion that nothing disturbed."""
    out = tmp_path_factory.mktemp("resume") / "whole"
    convert(source, out, **OPTIONS)
    return files_of(out)


def break_off(monkeypatch, source: Path, out: Path, after: int, **options) -> list[str]:
    """Convert and fail after so many tensors; the names of what is left."""
    with monkeypatch.context() as patch:
        real, count = safetensors_writer.array_bytes, 0

        def fail(array):
            nonlocal count
            count += 1
            if count > after:
                raise KeyboardInterrupt
            return real(array)

        patch.setattr(safetensors_writer, "array_bytes", fail)
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, **(OPTIONS | options))
    return sorted(path.name for path in out.with_name(out.name + ".partial").glob("model-*"))


def watch_writes(monkeypatch) -> list[str]:
    """Names of the weight files that are written from now on."""
    written, real = [], conversion.write_file

    def write_file(path, *args, **options):
        written.append(path.name)
        return real(path, *args, **options)

    monkeypatch.setattr(conversion, "write_file", write_file)
    return written


@pytest.mark.parametrize("after", [30, 60, 100])
def test_a_conversion_is_resumed_after_its_last_finished_file(
    source, whole, tmp_path, monkeypatch, after
):
    out = tmp_path / "out"
    left = break_off(monkeypatch, source, out, after)
    assert left
    written, said = watch_writes(monkeypatch), []
    convert(source, out, **OPTIONS, resume=True, log=said.append)
    assert files_of(out) == whole
    count = len([name for name in whole if name.startswith("model-")])
    assert len(written) == count - len(left)
    assert f"{len(left)} of {count} files done" in said[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_unfinished_conversion_is_found_without_being_asked_for(
    source, whole, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    break_off(monkeypatch, source, out, 40)
    before = files_of(tmp_path / "out.partial")
    with pytest.raises(UserError, match="unfinished conversion.*--resume.*--overwrite"):
        convert(source, out, **OPTIONS)
    assert files_of(tmp_path / "out.partial") == before
    convert(source, out, **OPTIONS, overwrite=True)
    assert files_of(out) == whole


@pytest.mark.parametrize("fault", ["flipped", "short", "gone"])
def test_finished_files_are_checked(source, whole, tmp_path, monkeypatch, fault):
    """A bit that flipped, a file cut short, a file that is gone: each is written again."""
    out = tmp_path / "out"
    left = break_off(monkeypatch, source, out, 60)
    victim = tmp_path / "out.partial" / left[1]
    data = victim.read_bytes()
    if fault == "gone":
        victim.unlink()
    elif fault == "short":
        victim.write_bytes(data[:-1])
    else:
        victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    said = []
    convert(source, out, **OPTIONS, resume=True, log=said.append)
    assert any("damaged" in line and left[1] in line for line in said)
    assert files_of(out) == whole


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"q_bits": 8}, "recipe"),
        ({"q_rules": ["self_attn.o_proj=8,32"]}, "recipe"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"shard_bytes": SIZE + 1}, "shard size"),
        ({"q_bits": None, "q_group_size": None}, "recipe"),
    ],
)
def test_another_recipe_is_refused(source, tmp_path, monkeypatch, change, word):
    out = tmp_path / "out"
    break_off(monkeypatch, source, out, 40)
    before = files_of(tmp_path / "out.partial")
    with pytest.raises(UserError, match=f"begun with another {word}"):
        convert(source, out, **(OPTIONS | change), resume=True)
    assert files_of(tmp_path / "out.partial") == before


def test_another_source_is_refused(source, tmp_path, monkeypatch):
    """A fine-tune has the same shapes and config; half of each would be no model."""
    out = tmp_path / "out"
    break_off(monkeypatch, source, out, 40)
    other = write_checkpoint(tmp_path / "other", seed=5)
    with pytest.raises(UserError, match="begun with another source"):
        convert(other, out, **OPTIONS, resume=True)
    # a copy elsewhere is the same source
    again = write_checkpoint(tmp_path / "again")
    convert(again, out, **OPTIONS, resume=True)


def test_another_version_is_refused(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    break_off(monkeypatch, source, out, 40)
    monkeypatch.setattr("mlx_kda.convert.conversion_plan.__version__", "9.9")
    with pytest.raises(UserError, match=r"another version: .*, now 9\.9"):
        convert(source, out, **OPTIONS, resume=True)


def test_resume_without_anything_to_resume(source, whole, tmp_path):
    """It starts; on a complete output of the same recipe there is nothing to do."""
    out, said = tmp_path / "out", []
    convert(source, out, **OPTIONS, resume=True, log=said.append)
    assert files_of(out) == whole and "no unfinished conversion" in said[0]
    report = convert(source, out, **OPTIONS, resume=True, log=said.append)
    assert "complete already" in said[-1] and report.bytes_out > 0
    assert files_of(out) == whole
    with pytest.raises(UserError, match="not empty"):
        convert(source, out, **(OPTIONS | {"q_bits": 8}), resume=True)


@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_an_output_that_lost_a_file_is_not_complete(source, whole, tmp_path, damage):
    out = tmp_path / "out"
    convert(source, out, **OPTIONS)
    file = max(out.glob("model-*.safetensors"))
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{file.name} is missing or cut short.*--overwrite"):
        convert(source, out, **OPTIONS, resume=True)
    convert(source, out, **OPTIONS, resume=True, overwrite=True)
    assert files_of(out) == whole


def test_a_byte_budget_is_measured_once(source, tmp_path, monkeypatch):
    """What was measured before the kill is not measured again, and the choice is the same."""
    options = {"target_bpw": 6.5, "shard_bytes": SIZE}
    real, count, stop = bit_budget.errors_of, 0, 0

    def counted(pieces, packings):
        nonlocal count
        count += 1
        if count == stop:
            raise KeyboardInterrupt
        return real(pieces, packings)

    monkeypatch.setattr(bit_budget, "errors_of", counted)
    convert(source, tmp_path / "whole", **options)
    all_of_them, count, stop = count, 0, 17
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", **options)
    measured = tmp_path / "out.partial" / ".measured.jsonl"
    assert len(measured.read_text().splitlines()) == 16
    with measured.open("a") as file:
        file.write('["model.layers.2.cut sho')
    count, stop = 0, 0
    convert(source, tmp_path / "out", **options, resume=True)
    # the weight whose line follows the torn one may be measured again
    assert all_of_them - 16 <= count <= all_of_them - 15
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_files_made_with_other_choices_are_written_again(source, whole, tmp_path, monkeypatch):
    """A budget spent by other code: a finished file is intact, and does not fit the rest."""
    left = break_off(monkeypatch, source, tmp_path / "out", 60)
    record = tmp_path / "out.partial" / f".{left[1]}.done.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"holds": "other tensors"}))
    written, said = watch_writes(monkeypatch), []
    convert(source, tmp_path / "out", **OPTIONS, resume=True, log=said.append)
    assert any("made with other options" in line and left[1] in line for line in said)
    assert any(left[1] in name for name in written)
    assert not any(left[0] in name for name in written)
    assert files_of(tmp_path / "out") == whole


def test_kill_9_at_any_moment_then_resume(source, whole, tmp_path):
    """Killed ten times over, between start and end; the files are those of one run.

    Each process writes two files of the 21 and then waits, so that none ends before it is killed.
    """
    folder = tmp_path / "place"
    folder.mkdir()
    out, partial = folder / "out", folder / "out.partial"
    options = ["--q-bits", "4", "--q-group-size", "32", "--shard-size", SIZE, "--resume"]
    seen = set()
    for number in range(10):
        pause = Pause("writing:2", tmp_path / f"pause{number}")
        with started([*pause.program, "convert", source, out, *options]) as process:
            # another file each time, so that every kill comes at another place
            wanted = 1 + number
            wait_for(
                lambda wanted=wanted: len(list(partial.glob("model-*.safetensors"))) >= wanted,
                "a file",
                process,
            )
            time.sleep(0.003 * number)
            process.kill()
        seen.add(len(list(partial.glob("model-*.safetensors"))))
        assert process.returncode == -signal.SIGKILL and not out.exists()
    assert len(seen) >= 5
    assert run("convert", str(source), str(out), *map(str, options)).returncode == 0
    assert files_of(out) == whole
    assert [path.name for path in folder.iterdir()] == ["out"]
