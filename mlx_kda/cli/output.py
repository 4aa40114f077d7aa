"""What a user sees: notes on standard error, text and tables on standard output, progress bars."""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TextIO

SHORT = 128  # units of work: less is done too quickly for a bar
NARROW = 60  # columns: on fewer a progress bar shows the counts only
UNBOUNDED = 100_000  # columns of a table in a pipe or a file
GAP = 2  # columns between two cells
# Control characters except tab and newline: a model's text must not control the terminal.
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def prepare_output() -> None:
    """Replace characters that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def note(line: str) -> None:
    """Print a line for the user on standard error; without control characters on a terminal."""
    if sys.stderr.isatty():  # it may hold file names and strings of a config.json
        line = line.translate(_CONTROL)
    print(line, file=sys.stderr, flush=True)


def has_cursor(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose cursor escape sequences can move."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def styled(stream: TextIO) -> bool:
    """Whether text on a stream may be bold or dim (see no-color.org for NO_COLOR)."""
    return has_cursor(stream) and not os.environ.get("NO_COLOR")


def write(text: str) -> None:
    """Write a model's text to standard output now; without control characters on a terminal."""
    if sys.stdout.isatty():
        text = text.translate(_CONTROL)
    sys.stdout.write(text)
    sys.stdout.flush()


def heading(line: str) -> None:
    """Print a heading on standard output, bold on a terminal."""
    _print(f"\n{line}", "1")


def detail(line: str) -> None:
    """Print a secondary line on standard output, dim on a terminal."""
    _print(f"  {line}", "2")


def paragraph(text: str) -> None:
    """Print a line on standard output, wrapped between words on a terminal."""
    _print(text, None)


def _print(text: str, style: str | None) -> None:
    """Print text; on a terminal wrapped to its width, and bold (1) or dim (2)."""
    if sys.stdout.isatty():
        import textwrap

        first = text.lstrip("\n")
        indent = " " * (len(first) - len(first.lstrip()) + 2)
        width = max(shutil.get_terminal_size().columns - 1, 20)
        wrapped = textwrap.fill(
            first, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        if style is not None and styled(sys.stdout):
            wrapped = f"\033[{style}m{wrapped}\033[0m"
        text = text[: len(text) - len(first)] + wrapped
    print(text, flush=True)


@contextlib.contextmanager
def status(message: str) -> Iterator[None]:
    """Show a spinner on standard error during the block, on a terminal only."""
    if not has_cursor(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


@contextlib.contextmanager
def progress(label: str, *, unit: str = "tokens") -> Iterator[Callable[[float, float], None]]:
    """Show a progress bar on standard error during the block, on a terminal only.

    Yields ``update(done, total)``. The bar appears at the first update below the total, unless the
    total is under ``SHORT`` units. Work in several parts may count from 0 again for each.
    """
    if not has_cursor(sys.stderr):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f} {unit}/s")

    console = Console(stderr=True)
    counts = TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}")
    columns = [TextColumn(label), BarColumn(), counts, Rate(), TimeRemainingColumn()]
    if console.width < NARROW:
        columns = [TextColumn(label), counts]
    bar = Progress(*columns, console=console, transient=True)
    task = None

    def update(done: float, total: float) -> None:
        nonlocal task
        if task is None:
            if done == total or total < SHORT:
                return
            bar.start()
            task = bar.add_task(label, total=total)
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()
            bar.remove_task(task)  # another part may begin
            task = None

    try:
        yield update
    finally:
        bar.stop()


@contextlib.contextmanager
def byte_progress(label: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar in MB; ``update(done, total, name)`` takes bytes and what is done."""
    with progress(label, unit="MB") as bar:
        yield lambda done, total, name: bar(done / 1e6, total / 1e6)


def print_table(
    rows: Sequence[Sequence[str]], head: Sequence[str] = (), right: Collection[str] = ()
) -> None:
    """Print cells in columns, without styles and without trailing blanks.

    Args:
        rows: the cells, as text.
        head: the columns' headings; () for none.
        right: the headings of right-aligned columns.

    No cell is truncated: on a terminal cells wrap between words, and a table with headings that is
    too narrow for some word is printed one cell per line.
    """
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNBOUNDED
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=bool(head))
    for name in head or rows[0]:
        table.add_column(
            name if head else "",
            justify="right" if name in right else "left",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    laid_out = io.StringIO()
    console = Console(
        file=laid_out, width=width, color_system=None, markup=False, emoji=False, highlight=False
    )
    unbounded = console.options.update(max_width=UNBOUNDED)
    if head and Measurement.get(console, unbounded, table).minimum > width:
        lines = [line for row in rows for line in _one_by_one(row, head)]
    else:
        console.print(table)
        lines = laid_out.getvalue().rstrip("\n").split("\n")
    print("\n".join(line.rstrip() for line in lines), flush=True)


def _one_by_one(row: Sequence[str], head: Sequence[str]) -> list[str]:
    """A row's cells, one per line, with their headings."""
    named = [f"{name}: {cell}" if name else cell for name, cell in zip(head, row, strict=True)]
    return [named[0], *(f"  {cell}" for cell in named[1:])]
