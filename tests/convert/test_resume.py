"""Conversions that were killed, failed or begun twice: they go on, and the files are the same."""

import fcntl
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.tiny_checkpoint import write_checkpoint

from mlx_kda.convert import convert
from mlx_kda.errors import UserError
from mlx_kda.weights import safetensors_writer

SIZE = 22_000
WISH = {"q_bits": 4, "q_group_size": 32, "shard_bytes": SIZE}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("resume") / "source")


@pytest.fixture(scope="module")
def whole(source):
    """The files of a conversion that nothing disturbed."""
    convert(source, source.parent / "whole", **WISH)
    return files(source.parent / "whole")


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def break_off(monkeypatch, source: Path, out: Path, after: int, **wish) -> list[str]:
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
            convert(source, out, **(WISH | wish))
    return sorted(path.name for path in out.with_name(out.name + ".partial").glob("model-*"))


def watch_writes(monkeypatch) -> list[str]:
    """Names of the weight files that are written from now on."""
    from mlx_kda.convert import conversion

    written, real = [], conversion.write_file

    def write_file(path, *args, **options):
        written.append(path.name)
        return real(path, *args, **options)

    monkeypatch.setattr(conversion, "write_file", write_file)
    return written


@pytest.mark.parametrize("after", [30, 60, 100])
def test_a_conversion_goes_on_where_it_was(source, whole, tmp_path, monkeypatch, after):
    out = tmp_path / "out"
    left = break_off(monkeypatch, source, out, after)
    assert left
    written, said = watch_writes(monkeypatch), []
    convert(source, out, **WISH, resume=True, log=said.append)
    assert files(out) == whole
    count = len([name for name in whole if name.startswith("model-")])
    assert len(written) == count - len(left)
    assert f"{len(left)} of {count} files done" in said[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_unfinished_conversion_is_found_without_being_asked_for(
    source, whole, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    break_off(monkeypatch, source, out, 40)
    before = files(tmp_path / "out.partial")
    with pytest.raises(UserError, match="unfinished conversion.*--resume.*--overwrite"):
        convert(source, out, **WISH)
    assert files(tmp_path / "out.partial") == before
    convert(source, out, **WISH, overwrite=True)
    assert files(out) == whole


@pytest.mark.parametrize("fault", ["flipped", "short", "gone"])
def test_what_is_there_is_checked(source, whole, tmp_path, monkeypatch, fault):
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
    convert(source, out, **WISH, resume=True, log=said.append)
    assert any("damaged" in line and left[1] in line for line in said)
    assert files(out) == whole


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
    before = files(tmp_path / "out.partial")
    with pytest.raises(UserError, match=f"begun with another {word}"):
        convert(source, out, **(WISH | change), resume=True)
    assert files(tmp_path / "out.partial") == before


def test_another_source_is_refused(source, tmp_path, monkeypatch):
    """A fine-tune has the same shapes and config; half of each would be no model."""
    out = tmp_path / "out"
    break_off(monkeypatch, source, out, 40)
    other = write_checkpoint(tmp_path / "other", seed=5)
    with pytest.raises(UserError, match="begun with another source"):
        convert(other, out, **WISH, resume=True)
    # a copy elsewhere is the same source
    again = write_checkpoint(tmp_path / "again")
    convert(again, out, **WISH, resume=True)


def test_another_version_is_refused(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    break_off(monkeypatch, source, out, 40)
    monkeypatch.setattr("mlx_kda.convert.conversion_plan.__version__", "9.9")
    with pytest.raises(UserError, match=r"another version: .*, now 9\.9"):
        convert(source, out, **WISH, resume=True)


def test_resume_without_anything_to_resume(source, whole, tmp_path):
    """It begins; and on an output that is whole there is nothing to do, of this recipe only."""
    out, said = tmp_path / "out", []
    convert(source, out, **WISH, resume=True, log=said.append)
    assert files(out) == whole and "no unfinished conversion" in said[0]
    report = convert(source, out, **WISH, resume=True, log=said.append)
    assert "complete already" in said[-1] and report.bytes_out > 0
    assert files(out) == whole
    with pytest.raises(UserError, match="not empty"):
        convert(source, out, **(WISH | {"q_bits": 8}), resume=True)


@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_resume_does_not_call_an_output_whole_that_lost_a_file(source, whole, tmp_path, damage):
    """The report alone used to be looked at."""
    out = tmp_path / "out"
    convert(source, out, **WISH)
    file = max(out.glob("model-*.safetensors"))
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{file.name} is missing or cut short.*--overwrite"):
        convert(source, out, **WISH, resume=True)
    convert(source, out, **WISH, resume=True, overwrite=True)
    assert files(out) == whole


def test_a_byte_budget_is_measured_once(source, tmp_path, monkeypatch):
    """What was measured before the kill is not measured again, and the choice is the same."""
    import mlx_kda.convert.bit_budget as budget

    wish = {"target_bpw": 6.5, "shard_bytes": SIZE}
    real, count, stop = budget.errors_of, 0, 0

    def counted(pieces, packings):
        nonlocal count
        count += 1
        if count == stop:
            raise KeyboardInterrupt
        return real(pieces, packings)

    monkeypatch.setattr(budget, "errors_of", counted)
    convert(source, tmp_path / "whole", **wish)
    all_of_them, count, stop = count, 0, 17
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", **wish)
    measured = tmp_path / "out.partial" / ".measured.jsonl"
    assert len(measured.read_text().splitlines()) == 16
    with measured.open("a") as file:
        file.write('["model.layers.2.cut sho')
    count, stop = 0, 0
    convert(source, tmp_path / "out", **wish, resume=True)
    # one weight more, whose line came behind the torn one, is no matter
    assert all_of_them - 16 <= count <= all_of_them - 15
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_files_of_another_choice_are_written_again(source, whole, tmp_path, monkeypatch):
    """A budget spent by other code: a finished file is whole, and does not fit the rest."""
    left = break_off(monkeypatch, source, tmp_path / "out", 60)
    record = tmp_path / "out.partial" / f".{left[1]}.done.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"holds": "other tensors"}))
    written, said = watch_writes(monkeypatch), []
    convert(source, tmp_path / "out", **WISH, resume=True, log=said.append)
    assert any("made with other choices" in line and left[1] in line for line in said)
    assert any(left[1] in name for name in written)
    assert not any(left[0] in name for name in written)
    assert files(tmp_path / "out") == whole


# --- other processes

COMMAND = [sys.executable, "-m", "mlx_kda.cli.main", "convert"]
OPTIONS = ["--q-bits", "4", "--q-group-size", "32", "--shard-size", str(SIZE)]


def test_a_second_process_is_refused(source, tmp_path):
    """The lock is the system's, so it falls with the process that holds it."""
    partial = tmp_path / "out.partial"
    partial.mkdir()
    with (partial / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        run = subprocess.run(
            [*COMMAND, source, tmp_path / "out", *OPTIONS], capture_output=True, text=True
        )
        assert run.returncode == 2
        assert "another conversion" in run.stderr and run.stderr.count("\n") == 1
    convert(source, tmp_path / "out", **WISH)


def test_kill_9_at_any_moment_then_resume(source, whole, tmp_path):
    """Case E4: killed ten times over, between start and end; the files are those of one run.

    Each writes two files of the 21 and then waits, so that none ends before it is killed.
    """
    out = tmp_path / "out"
    command = [*COMMAND, source, out, *OPTIONS, "--resume"]
    slow = (
        "import sys, time; from mlx_kda.convert import conversion\n"
        "from mlx_kda.cli.main import main\n"
        "real, pauses = conversion.write_file, [0.01, 0.01]\n"
        "def write_file(*a, **k):\n"
        "    time.sleep(pauses.pop() if pauses else 300)\n"
        "    return real(*a, **k)\n"
        "conversion.write_file = write_file; sys.exit(main(sys.argv[1:]))"
    )
    seen = set()
    for number in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", slow, *command[3:]],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        partial, begun = tmp_path / "out.partial", time.monotonic()
        wanted = 1 + number  # another file each time, so that every kill comes at another place
        while process.poll() is None and time.monotonic() - begun < 120:
            if len(list(partial.glob("model-*.safetensors"))) >= wanted or out.exists():
                break
            time.sleep(0.002)
        time.sleep(0.003 * number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen.add(len(list(partial.glob("model-*.safetensors"))))
        assert process.returncode == -signal.SIGKILL and not out.exists()
    assert len(seen) >= 5
    subprocess.run(command, check=True, capture_output=True)
    assert files(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
