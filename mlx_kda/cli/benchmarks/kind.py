"""What a kind of `mlx-kda bench` is made of, and the options that several share.

Nothing heavy is imported until rows are asked for.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import options

Rows = Iterator[dict[str, Any]]

LONGEST, MOST = 86_400, 10**9  # seconds, and anything that is counted


@dataclass(frozen=True)
class Benchmark:
    """One kind: its name, what it is in a line, its columns, options and rows."""

    name: str
    what: str
    columns: dict[str, str]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    rows: Callable[[argparse.Namespace], Rows]
    note: str = ""


def timed(parser: argparse.ArgumentParser) -> None:
    """The options of what is timed."""
    parser.add_argument(
        "--samples",
        type=options.number(int, 3, MOST),
        default=7,
        metavar="N",
        help="samples of a candidate and size (default: 7)",
    )
    parser.add_argument(
        "--budget",
        type=options.number(float, 0.1, LONGEST),
        default=20.0,
        metavar="S",
        help="seconds a candidate and size may take, but for three samples (default: 20)",
    )


def columns(names: str, **headings: str) -> dict[str, str]:
    """Key -> heading, which is the key itself where none is given."""
    return {name: headings.get(name, name) for name in names.split()}
