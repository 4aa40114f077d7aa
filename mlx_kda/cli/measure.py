"""Measure this package against its peers on this machine, and say how steady the numbers are."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ..files import write_text
from . import loading, options
from .benchmarks import BENCHMARKS, LONGEST, Benchmark, Promise
from .output import note
from .signals import exit_on_signals

SUMMARY = "measure against peers on this machine"
BROKEN = 1  # exit status where a promise was not kept
EXAMPLE = (
    "mlx-kda bench op --tokens 1,512,2048 --heads 32\n"
    "  mlx-kda bench model kimi-4bit --contexts 1024,8192\n"
    "  mlx-kda bench all --report report.md        # the page to send in from a Mac\n"
    "  mlx-kda bench constant examples/tiny-fla-kda --text book.txt --report constant.md\n"
    "  mlx-kda bench plot results/op.json op"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    for benchmark in BENCHMARKS.values():
        kind = kinds.add_parser(benchmark.name, help=benchmark.what, description=benchmark.what)
        benchmark.add_arguments(kind)
        kind.add_argument(
            "--out",
            metavar="DIR",
            help=f"write {benchmark.name}.json and .csv (and .partial.json until all is there)",
        )
        if isinstance(benchmark, Promise):
            kind.add_argument("--report", metavar="FILE", help="Markdown page to write")

    everything = kinds.add_parser(
        "all",
        help="most of the others, as one page",
        description="op, model, buffers (on a GPU), profile, convert, launches and counters on "
        "this machine, as one Markdown page",
    )
    everything.add_argument("--report", metavar="FILE", required=True, help="page to write")
    everything.add_argument(
        "--model",
        metavar="MODEL",
        help="folder of a checkpoint (default: the small one, converted)",
    )
    everything.add_argument(
        "--source",
        metavar="SRC",
        help="folder of the checkpoint to convert (default: the small one)",
    )
    everything.add_argument(
        "--budget",
        type=options.number(float, 0.1, LONGEST),
        default=10.0,
        metavar="S",
        help="seconds a candidate and size may take, but for three samples (default: 10)",
    )
    everything.add_argument(
        "--tokens",
        type=options.numbers,
        default=[1, 64, 512, 2048],
        metavar="T,T",
        help="tokens of op (default: 1,64,512,2048)",
    )
    everything.add_argument(
        "--recorded",
        metavar="FILE",
        action="append",
        default=[],
        help="JSON of bench cuda, model or profile from another machine, to add; may be repeated",
    )

    plot = kinds.add_parser("plot", help="draw saved results to SVG and PNG")
    plot.add_argument("results", metavar="FILE", help="JSON that --out wrote")
    plot.add_argument("picture", metavar="OUT", help="path without a suffix")


def run(args: argparse.Namespace) -> int:
    with exit_on_signals():  # SIGTERM too: temporary folders go
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from ..bench import results

    if args.kind == "plot":
        saved = results.load(Path(args.results))

        from ..bench.plot import draw

        for path in draw(saved, Path(args.picture)):
            note(f"wrote {path}")
        return 0
    command = _command(args)
    if args.kind == "all":
        loading.check_writable(args.report, "--report")
        if args.model is not None:
            loading.check_model(args.model)
        if args.source is not None:
            loading.check_folder(args.source)

        from .benchmarks import page

        page.write(Path(args.report), command, args, run_one)
        note(f"wrote {args.report}")
        return 0

    benchmark = BENCHMARKS[args.kind]
    report = getattr(args, "report", None)
    loading.check_writable(report, "--report")

    @cache
    def about() -> dict[str, Any]:
        from ..bench import machine  # MLX, which a mistake in the arguments need not wait for

        return machine.describe(command)

    saving = results.Saving(Path(args.out), args.kind, about) if args.out else None
    try:
        rows = run_one(benchmark, args, saving.add if saving else None)
    except BaseException:
        if saving:
            saving.close()
            if saving.path.is_file():
                note(f"rows until then: {saving.path}")
        raise
    written = saving.finish() if saving else ()  # before anything is printed: a pipe may be closed
    if report:
        write_text(Path(report), benchmark.page(about(), rows))
        written = (*written, Path(report))
    print(results.markdown(rows, benchmark.columns))
    if benchmark.note:
        note(benchmark.note)
    for path in written:
        note(f"wrote {path}")
    broken = benchmark.broken(rows) if isinstance(benchmark, Promise) else []
    for line in broken:
        note(f"not kept: {line}")
    return BROKEN if broken else 0


# What the environment may tell MLX that changes times or results.
_SETTINGS = (
    *("MLX_ENABLE_TF32", "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER", "MLX_BFS_MAX_WIDTH"),
    *("MLX_DISABLE_COMPILE", "MLX_METAL_FAST_SYNCH", "MLX_USE_CUDA_GRAPHS"),
)


def _command(args: argparse.Namespace) -> str:
    """The command as it can be repeated, with what the user told MLX by the environment.

    Of an absolute path only the name: pages are published, and where files lie here says nothing to
    others.
    """
    from .main import MLX_SETTINGS

    scratch = getattr(args, "folder", None)
    told = ["FOLDER" if a == scratch else _name(a) for a in sys.argv[1:]]
    settings = [
        f"{name}={shlex.quote(os.environ[name])}"
        for name in _SETTINGS
        if name in os.environ and os.environ[name] != MLX_SETTINGS.get(name)
    ]
    return " ".join([*settings, shlex.join(["mlx-kda", *told])])


def _name(argument: str) -> str:
    option, equals, value = argument.rpartition("=") if argument[:2] == "--" else ("", "", argument)
    return option + equals + (Path(value).name if value[:1] == "/" else value)


def run_one(
    benchmark: Benchmark, args: argparse.Namespace, keep: Callable | None = None
) -> list[dict[str, Any]]:
    """The rows of one kind, each told on standard error and to ``keep`` as it comes."""
    from ..bench import results

    rows = []
    for row in benchmark.rows(args):
        note("  ".join(results.show(row.get(key)) for key in benchmark.columns).rstrip())
        rows.append(row)
        if keep is not None:
            keep(row)
    if noise := results.noise(rows):
        note(f"{noise}: this machine was busy, run again before quoting them")
    return rows
