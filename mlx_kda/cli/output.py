"""What a person sees: lines on standard error, a model's text, spinners and bars on a terminal."""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TextIO

SHORT = 128  # units of work that need no bar
NARROW = 60  # columns in which bar, rate and time left have no room beside the counts
UNBOUNDED = 100_000  # columns of a table in a pipe or a file
GAP = 2  # columns between two cells
# What a model writes must not drive the terminal: control characters but tab and newline.
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def prepare_output() -> None:
    """Let no character that the terminal's encoding lacks end a run."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def note(line: str) -> None:
    """A line for the person, on standard error; without control characters on a terminal."""
    if sys.stderr.isatty():  # names of files and words of a config may be in it
        line = line.translate(_CONTROL)
    print(line, file=sys.stderr, flush=True)


def moves(stream: TextIO) -> bool:
    """Whether a stream is a terminal that understands escape sequences: a cursor can be moved."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def styled(stream: TextIO) -> bool:
    """Whether text on a stream may be bold or dim. (NO_COLOR asks for plain text, no-color.org.)"""
    return moves(stream) and not os.environ.get("NO_COLOR")


def write(text: str) -> None:
    """A model's text on standard output, at once; without control characters on a terminal."""
    if sys.stdout.isatty():
        text = text.translate(_CONTROL)
    sys.stdout.write(text)
    sys.stdout.flush()


def heading(line: str) -> None:
    """A line on standard output that begins a part, bold on a terminal."""
    _print(f"\n{line}", "1")


def detail(line: str) -> None:
    """A line on standard output beside what matters, dim on a terminal."""
    _print(f"  {line}", "2")


def paragraph(text: str) -> None:
    """A line on standard output; on a terminal wrapped to its width between words."""
    _print(text, None)


def _print(text: str, style: str | None) -> None:
    """A line on standard output; on a terminal wrapped to its width, bold (1) or dim (2)."""
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
    """A spinner on standard error while something runs, on a terminal only."""
    if not moves(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


@contextlib.contextmanager
def progress(label: str, *, unit: str = "tokens") -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error with rate and time left, on a terminal only.

    Gives ``update(done, total)``; the bar appears with the first one short of the total, and not
    for so little (``SHORT`` of a unit) that it would only flash up. Work of several parts may count
    from the start again once a part has reached its total.
    """
    if not moves(sys.stderr):
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

    def update(done: int, total: int) -> None:
        nonlocal task
        if task is None:
            if done == total or total < SHORT:
                return
            bar.start()
            task = bar.add_task(label, total=total)
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()
            bar.remove_task(task)  # another part of the work may begin
            task = None

    try:
        yield update
    finally:
        bar.stop()


def print_table(
    rows: Sequence[Sequence[str]], head: Sequence[str] = (), right: Collection[str] = ()
) -> None:
    """Print cells in columns, without styles and without trailing blanks.

    Args:
        rows: the cells, as text.
        head: the columns' headings; () for none.
        right: the headings of the columns that are set to the right.

    No cell is ever cut: on a terminal it is folded between words, and where some word is wider than
    its column could be, a table with headings is printed cell by cell.
    """
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNBOUNDED
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=bool(head))
    for name in head or rows[0]:
        justify = "right" if name in right else "left"
        table.add_column(name if head else "", justify=justify, overflow="fold")
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
    """A row's cells, a line each, with what they are."""
    named = [f"{name}: {cell}" if name else cell for name, cell in zip(head, row, strict=True)]
    return [named[0], *(f"  {cell}" for cell in named[1:])]
