"""Check a converted folder, and with --source compare its weights and logits with the source.

Both are streamed, one expert at a time, so neither has to fit in memory. The exit status is 1 if a
check fails.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError, UserError
from . import loading, options, output
from .options import add_json, add_option, add_revision
from .output import print_table

if TYPE_CHECKING:
    from ..convert import Verification

SUMMARY = "check a converted model, and compare it with its source"
EXAMPLE = (
    "mlx-kda verify kimi-4bit\n"
    "  mlx-kda verify kimi-4bit --source path/to/Kimi-Linear-48B-A3B-Instruct --tokens text.txt"
)
FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="OUT", help="the converted folder")
    parser.add_argument(
        "--source", metavar="SRC", help="folder or hub id of the checkpoint it was converted from"
    )
    add_revision(parser)
    add_option(
        parser,
        "--tokens",
        "FILE",
        options.file_name,
        "text, or a .json list of token ids, to compare logits on (default: a built-in text)",
    )
    add_option(
        parser,
        "--max-tokens",
        "N",
        options.number(int, 2),
        "largest number of its tokens to compare (default: 2048)",
        2048,
    )
    add_option(
        parser,
        "--max-kl",
        "X",
        options.number(float, 0),
        "largest mean KL divergence allowed, in nats (default: three times what noise of the size "
        "of the rounding does to the source)",
    )
    add_option(
        parser,
        "--min-top1",
        "X",
        options.number(float, 0, 1),
        "smallest share of positions, 0 to 1, at which the most likely next token must stay the "
        "same (default: what such noise leaves, less 0.1)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.source is None:
        for name in ("tokens", "revision", "max_kl", "min_top1"):
            if getattr(args, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} needs --source, the checkpoint to compare with")
    _check_converted(args.folder)
    if args.source is not None:
        loading.check_folder(args.source)

    from ..convert import verify

    with output.byte_progress("verifying") as progress:
        found = verify(
            args.folder,
            args.source,
            args.tokens,
            revision=args.revision,
            max_kl=args.max_kl,
            min_top1=args.min_top1,
            max_tokens=args.max_tokens,
            progress=progress,
        )
    if args.json:
        print(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        _print(found)
    return 0 if found.ok else FAILED


def _check_converted(path: str) -> None:
    """Raise UserError for a path without a config.json."""
    if not path.strip():
        raise UserError("the name of the converted folder is empty")
    if not (Path(path) / "config.json").is_file():
        raise CheckpointError(f"{path} is not a converted model: it has no config.json")


def _print(found: "Verification") -> None:
    rows = [("ok" if c.ok else "FAIL", c.what, c.found, c.bound) for c in found.checks]
    print_table(rows, ("", "check", "found", "bound"))
    failed = sum(not check.ok for check in found.checks)
    checks_failed = f"{failed} check{'' if failed == 1 else 's'} failed"
    output.paragraph(f"{found.folder}: " + (checks_failed if failed else "all checks passed"))
