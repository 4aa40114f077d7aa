"""What a person sees: lines on standard error, a model's text, spinners and bars on a terminal."""

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SHORT = 128  # units of work that need no bar
# What a model writes must not drive the terminal: control characters but tab and newline.
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def prepare_output() -> None:
    """Let no character that the terminal's encoding lacks end a run."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def note(line: str) -> None:
    """A line for the person, on standard error."""
    print(line, file=sys.stderr, flush=True)


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


def _print(text: str, style: str) -> None:
    """A line on standard output; on a terminal wrapped to its width, bold (1) or dim (2)."""
    if sys.stdout.isatty():
        import textwrap

        first = text.lstrip("\n")
        indent = " " * (len(first) - len(first.lstrip()) + 2)
        width = max(shutil.get_terminal_size().columns - 1, 20)
        wrapped = textwrap.fill(first, width, subsequent_indent=indent)
        text = text[: len(text) - len(first)] + f"\033[{style}m{wrapped}\033[0m"
    print(text, flush=True)


def table_console(width: int) -> "Console":
    """Where tables are printed: as wide as the terminal; ``width`` in a pipe, where rich has 80."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = width
    return console


@contextlib.contextmanager
def status(message: str) -> Iterator[None]:
    """A spinner on standard error while something runs, on a terminal only."""
    if not sys.stderr.isatty():
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
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f} {unit}/s")

    bar = Progress(
        TextColumn(label),
        BarColumn(),
        TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}"),
        Rate(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
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
