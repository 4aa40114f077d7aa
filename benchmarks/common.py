"""What the scripts share: a program from a docstring, its options and its failures."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_kda.cli.main import BROKEN_PIPE, INTERRUPTED, MLX_SETTINGS, USER_ERROR
from mlx_kda.cli.measure import add_output, choice, count, numbers, seconds, timed
from mlx_kda.cli.options import Parser
from mlx_kda.cli.output import note
from mlx_kda.cli.signals import exit_on_signals
from mlx_kda.errors import UserError

__all__ = ["add_output", "choice", "count", "numbers", "read_text", "run", "seconds", "timed"]


def run(
    doc: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    main: Callable[[argparse.Namespace], int | None],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a script; the exit status. A user's mistake is one line on standard error.

    Args:
        doc: the script's docstring, shown by --help; its first line is also the summary.
        add_arguments: adds its options to the parser.
        main: does it, given the options.
        argv: the arguments; those of the process unless given.
    """
    parser = Parser(description=doc)
    add_arguments(parser)
    args = parser.parse_args(argv)
    for name, value in MLX_SETTINGS.items():  # before MLX multiplies its first matrices
        os.environ.setdefault(name, value)
    try:
        with exit_on_signals():
            return main(args) or 0
    except UserError as error:
        note(f"{parser.prog}: {' '.join(str(error).split())}")
        return USER_ERROR
    except KeyboardInterrupt:
        note(f"{parser.prog}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # Python would complain once more when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def read_text(path: str) -> str:
    """A text file in UTF-8. Raises UserError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
