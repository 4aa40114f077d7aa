"""Check a converted folder, and with --source compare its weights and logits with the source's.

Both are streamed, an expert at a time, so they need not fit the memory. Exit status 1 where a bound
is passed.
"""

import argparse
import json
from typing import TYPE_CHECKING

from ..errors import UserError
from . import checks, output, parsing
from .tables import print_table

if TYPE_CHECKING:
    from ..convert import Verification

SUMMARY = "check a converted folder, and compare it with its source"
EXAMPLE = (
    "mlx-kda verify kimi-4bit\n"
    "  mlx-kda verify kimi-4bit --source path/to/Kimi-Linear-48B-A3B-Instruct --tokens text.txt"
)
FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="OUT", help="the converted folder")
    parser.add_argument(
        "--source", metavar="SRC", help="folder or hub id of the checkpoint that it was made from"
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id")
    parser.add_argument(
        "--tokens",
        type=parsing.name,
        metavar="FILE",
        help="compare logits on this text, or on the ids in a .json list (default: a built-in one)",
    )
    parser.add_argument(
        "--max-tokens",
        type=parsing.number(int, 2),
        default=2048,
        metavar="N",
        help="tokens of that text to compare at most (default: 2048)",
    )
    parser.add_argument(
        "--max-kl",
        type=parsing.number(float, 0),
        metavar="X",
        help="bound of the mean KL divergence, in nats (default: three times what noise as large "
        "as the rounding does to the source)",
    )
    parser.add_argument(
        "--min-top1",
        type=parsing.number(float, 0, 1),
        metavar="X",
        help="share of the tokens whose likeliest successor must stay the same, 0 to 1 (default: "
        "what such noise leaves, less 0.1)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.source is None:
        for name in ("tokens", "revision", "max_kl", "min_top1"):
            if getattr(args, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} needs --source: without one nothing is compared")
    checks.converted(args.folder)
    if args.source is not None:
        checks.folder(args.source)

    from ..convert import verify

    with output.progress("verifying", unit="MB") as bar:
        found = verify(
            args.folder,
            args.source,
            args.tokens,
            revision=args.revision,
            max_kl=args.max_kl,
            min_top1=args.min_top1,
            max_tokens=args.max_tokens,
            progress=lambda done, total, name: bar(done / 1e6, total / 1e6),
        )
    if args.json:
        print(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        _print(found)
    return 0 if found.ok else FAILED


def _print(found: "Verification") -> None:
    rows = [("ok" if c.ok else "FAIL", c.what, c.found, c.bound) for c in found.checks]
    print_table(rows, ("", "check", "found", "bound"))
    failed = sum(not check.ok for check in found.checks)
    checks_failed = f"{failed} check{'' if failed == 1 else 's'} failed"
    output.paragraph(f"{found.folder}: " + (checks_failed if failed else "all is well"))
