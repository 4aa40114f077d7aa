"""Tables on standard output: folded to a terminal's width, one line a row in a pipe or a file."""

import io
import shutil
import sys
from collections.abc import Collection, Sequence

UNBOUNDED = 100_000  # columns, in a pipe or a file
GAP = 2  # columns between two cells


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
