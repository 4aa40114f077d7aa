"""`mlx-kda bench all`: a Markdown page of what was measured on this machine."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..convert import convert
from ..demo import find_checkpoint
from ..errors import UserError
from ..files import write_text
from . import buffers, machine, model, op
from .results import Benchmark, Row, Rows, markdown, noise
from .subject import Subject

Run = Callable[[Benchmark, Rows], list[Row]]
HEAD = """# Benchmarks

Written by `{command}` on {date}, commit {commit}.

- {chip} ({device}), {cores} cores, {memory_gb} GB
- {system}, Python {python}, {packages}

Times compare only within a table, where candidates took turns; what is marked (alone) ran by
itself. Numbers of another machine stand under a heading that says so. **Nothing here was measured
on an Apple GPU unless the line above says Metal.**"""
STOPPED = "The run was stopped before its end."


def write(
    path: Path, about: dict[str, Any], sections: Iterable[str], log: Callable[[str], None]
) -> None:
    """Write a page of sections as they are measured.

    An interrupted run leaves its sections in a file beside ``path`` with ".partial" in its name.

    Raises:
        UserError: the page cannot be written.
    """
    known = {"commit": about["commit"] or "unknown", "packages": machine.packages(about)}
    parts = [HEAD.format(**{**about, **known})]
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        parts.extend(sections)
    except BaseException:
        if len(parts) > 1:
            _save(partial, [*parts, STOPPED])
            log(f"measured so far: {partial}")
        raise
    _save(path, parts)
    partial.unlink(missing_ok=True)


def measured(
    run: Run, folder: str, tokens: Sequence[int], budget: float, about: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield (name, section) of op, model and, on a GPU, buffers; ``run`` collects their rows."""
    found = op.run(list(tokens), [4, 32], budget=budget)
    yield "op", section(op.BENCHMARK, run(op.BENCHMARK, found), about)
    subject = Subject(folder)
    found = model.of(subject, contexts=[256, 1024], samples=5, budget=budget)
    yield "model", section(model.BENCHMARK, run(model.BENCHMARK, found), about)
    if about["device"] != "CPU":  # which has no command buffers
        arguments = [folder, "--contexts=1024", "--samples=3", f"--budget={budget}"]
        found = buffers.run(arguments)
        yield "buffers", section(buffers.BENCHMARK, run(buffers.BENCHMARK, found), about)


def small_model(scratch: Path) -> str:
    """The repository's small checkpoint, converted into a folder; raises UserError without it."""
    out = scratch / "tiny-kimi-linear"
    convert(find_checkpoint(None, "bench all --model MODEL"), out, dtype="float32")
    return str(out)


def section(benchmark: Benchmark, rows: Sequence[Row], about: dict[str, Any]) -> str:
    """A benchmark's table under its title, with its note and how steady it is."""
    table = markdown(rows, benchmark.columns)
    return joined(f"## {benchmark.title}", table, benchmark.note, unsteady(rows, about))


def unsteady(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """A sentence on noisy rows; "" where there are none."""
    found = noise(rows)
    return f"{found}: the machine ({about['cores']} cores) was not quiet." if found else ""


def joined(*parts: str) -> str:
    """Paragraphs, without the empty ones."""
    return "\n\n".join(part for part in parts if part)


def _save(path: Path, parts: list[str]) -> None:
    try:
        write_text(path, joined(*parts) + "\n")
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}") from e
