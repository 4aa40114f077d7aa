"""Measure this package against its peers on this machine, and say how steady the numbers are."""

import argparse
import itertools
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_kda.cli import common

SUMMARY = "measure against peers on this machine"
EXAMPLE = (
    "mlx-kda bench op --tokens 1,512,2048 --heads 32\n"
    "  mlx-kda bench model kimi-4bit --contexts 1024,8192\n"
    "  mlx-kda bench endurance --steps 30000 --out results\n"
    "  mlx-kda bench plot results/op.json op"
)

COLUMNS = {
    "op": {
        "H": "H",
        "T": "T",
        "candidate": "candidate",
        "path": "path",
        "ms": "ms",
        "us_per_token": "us a token",
        "spread": "spread",
        "calls": "calls",
        "error": "error",
    },
    "model": {
        "context": "context",
        "phase": "phase",
        "candidate": "candidate",
        "ms": "ms",
        "tokens_per_second": "tokens/s",
        "spread": "spread",
        "launches": "launches",
        "peak_mb": "peak MB",
    },
    "convert": {
        "candidate": "candidate",
        "q_bits": "bits",
        "seconds": "s",
        "slowest": "slowest s",
        "peak_mb": "peak MB",
        "failed": "failed",
    },
    "endurance": {
        "run": "run",
        "policy": "policy",
        "tokens": "tokens",
        "resident_mb": "resident MB",
        "arrays": "live arrays",
        "peak_mb": "peak MB",
        "cache_mb": "cache MB",
        "tokens_per_second": "tokens/s",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)

    op = _kind(kinds, "op", "the op's paths against mlx-lm's, with the error beside the time")
    op.add_argument("--tokens", type=_integers, default=[1, 64, 512, 2048], metavar="T,T")
    op.add_argument("--heads", type=_integers, default=[4, 32], metavar="H,H")
    op.add_argument("--dim", type=common.number(int, 1), default=128, metavar="D")
    op.add_argument("--batch", type=common.number(int, 1), default=1, metavar="B")
    op.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    op.add_argument("--row", default="random", help="kind of inputs (default: random)")
    op.add_argument("--paths", default="auto", help="ours to run (default: auto)")

    model = _kind(kinds, "model", "prefill and decode of an MLX folder against mlx-lm's class")
    model.add_argument("model", metavar="MODEL")
    model.add_argument("--contexts", type=_integers, default=[1024, 8192], metavar="N,N")

    convert = _kind(kinds, "convert", "seconds and peak memory against mlx_lm.convert")
    convert.add_argument("source", metavar="SRC")
    convert.add_argument("--q-bits", type=int, metavar="N")

    endurance = kinds.add_parser(
        "endurance",
        help="memory over long runs of a small model of 24 layers",
        description="memory over long runs of a small random model of 24 layers",
    )
    endurance.add_argument("--steps", type=common.number(int, 0), default=30_000, metavar="N")
    endurance.add_argument(
        "--prompts", type=_integers, default=[20_000, 100_000], metavar="N,N", help="lengths"
    )
    endurance.add_argument("--policy", default="window:1024+16", help="default: window:1024+16")
    endurance.add_argument("--out", metavar="DIR", help="write endurance.json and .csv there")

    plot = kinds.add_parser("plot", help="draw saved results to SVG and PNG")
    plot.add_argument("results", metavar="FILE", help="JSON that --out wrote")
    plot.add_argument("picture", metavar="OUT", help="path without a suffix")


def _kind(kinds: Any, name: str, what: str) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, help=what, description=what)
    parser.add_argument("--samples", type=common.number(int, 3), default=7, metavar="N")
    parser.add_argument(
        "--budget",
        type=common.number(float, 0.1),
        default=20.0,
        metavar="S",
        help="seconds a candidate and size may take (default: 20)",
    )
    parser.add_argument("--out", metavar="DIR", help="write WHAT.json and WHAT.csv there")
    return parser


def run(args: argparse.Namespace) -> int:
    from mlx_kda.bench import machine, results

    if args.kind == "plot":
        from mlx_kda.bench.plot import draw

        for path in draw(results.load(Path(args.results)), Path(args.picture)):
            common.note(f"wrote {path}")
        return 0

    rows = []
    for row in _rows(args):
        common.note("  ".join(results.show(row.get(key)) for key in COLUMNS[args.kind]))
        rows.append(row)
    about = machine.describe(shlex.join(["mlx-kda", *sys.argv[1:]]))
    print(results.markdown(rows, COLUMNS[args.kind]))
    noisy = sum(row.get("steady") is False for row in rows)
    if noisy:
        common.note(
            f"{noisy} of {len(rows)} rows spread over more than 5 % of their median: "
            "this machine was busy, run again before quoting them"
        )
    if args.out:
        for path in results.save(Path(args.out), args.kind, about, rows):
            common.note(f"wrote {path}")
    return 0


def _rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if args.kind == "op":
        from mlx_kda import oracle
        from mlx_kda.bench import op
        from mlx_kda.errors import UserError
        from mlx_kda.ops import PATHS

        if args.row not in oracle.ROWS:
            raise UserError(f"--row is one of {', '.join(oracle.ROWS)}, got {args.row!r}")
        paths = args.paths.split(",")
        unknown = [path for path in paths if path not in PATHS]
        if unknown:
            raise UserError(f"--paths takes {', '.join(PATHS)}, got {unknown[0]!r}")
        return op.run(
            args.tokens,
            args.heads,
            dim=args.dim,
            batch=args.batch,
            dtype=args.dtype,
            row=args.row,
            paths=paths,
            samples=args.samples,
            budget=args.budget,
        )
    if args.kind == "model":
        from mlx_kda.bench import model

        return model.run(Path(args.model), args.contexts, samples=args.samples, budget=args.budget)
    if args.kind == "endurance":
        from mlx_kda.bench import endurance

        return itertools.chain(
            endurance.decode(args.steps, policy=args.policy),
            endurance.prompts(args.prompts, policy=args.policy),
        )
    from mlx_kda.bench import conversion

    return conversion.run(Path(args.source), q_bits=args.q_bits, samples=min(args.samples, 3))


def _integers(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,512,2048")
    return values
