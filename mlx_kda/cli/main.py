"""The program ``mlx-kda``: finds and runs a command, and reports every failure in one line.

Neither this module nor the commands import MLX at the top, so that ``--help`` and mistakes are
answered at once; a command imports what it needs when it runs.
"""

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from .. import __version__
from ..errors import UserError
from .options import Parser
from .output import note, prepare_output
from .signals import interrupt_once

COMMANDS = ("convert", "verify", "plan", "generate", "chat", "info", "bench", "doctor", "demo")
MODULES = {"bench": "measure"}  # of commands that are not named like their module

# Set before MLX is imported, unless the user has set them. By default MLX rounds float32 matrix
# products to about TF32 from the M5 on, also in the router, where that can change the experts.
MLX_SETTINGS = {"MLX_ENABLE_TF32": "0"}

# Exit statuses: 2 for a user's mistake (argparse's own), 128 + signal number as shells have it.
USER_ERROR = 2
UNEXPECTED = 1
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE, which the signal module lacks on some systems


def build_parser() -> Parser:
    """The parser of all commands; each command's module adds its own options."""
    parser = Parser(
        prog="mlx-kda",
        description="Convert, inspect and run Kimi Delta Attention models on Apple Silicon.",
        epilog="example:\n  mlx-kda convert path/to/Kimi-Linear kimi-4bit --q-bits 4\n"
        "  mlx-kda chat kimi-4bit",
    )
    parser.add_argument("--version", action="version", version=f"mlx-kda {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f".{MODULES.get(name, name)}", __package__)
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            epilog=f"example:\n  {module.EXAMPLE}",
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Bad arguments raise argparse's SystemExit(2)."""
    args = argparse.Namespace(debug=False)
    try:
        if argv is None:  # the program itself
            interrupt_once()
        args = build_parser().parse_args(argv)
        prepare_output()
        for name, value in MLX_SETTINGS.items():
            os.environ.setdefault(name, value)
        status = args.run(args)
        sys.stdout.flush()
        return status or 0
    except UserError as error:
        return _fail(args.debug, " ".join(str(error).split()), USER_ERROR)
    except KeyboardInterrupt:
        if argv is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = _fail(args.debug, "interrupted", INTERRUPTED)
        if argv is None:  # one more Ctrl-C while the program exits kills it silently
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        return status
    except BrokenPipeError:
        # The reader of the output is gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        what = " ".join(str(error).split())
        hint = "" if args.debug else " (run mlx-kda --debug ... for the traceback)"
        return _fail(args.debug, f"{type(error).__name__}: {what}{hint}", UNEXPECTED)


def _fail(debug: bool, line: str, status: int) -> int:
    if debug:
        traceback.print_exc()
    note(f"mlx-kda: {line}")
    return status


if __name__ == "__main__":
    sys.exit(main())
