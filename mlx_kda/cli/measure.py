"""Measure this package against mlx-lm on this machine, and report how steady the numbers are."""

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files import write_text
from . import loading, options
from .output import note
from .signals import exit_on_signals

if TYPE_CHECKING:
    from ..bench.results import Benchmark, Row, Rows
    from ..bench.subject import Subject

SUMMARY = "measure against mlx-lm on this machine"
EXAMPLE = (
    "mlx-kda bench op --tokens 1,512,2048 --heads 32\n"
    "  mlx-kda bench model kimi-4bit --contexts 1024,8192\n"
    "  mlx-kda bench op --out results --plot\n"
    "  mlx-kda bench all --report report.md        # the page to send in from a Mac"
)
NOT_KEPT = 1  # exit status where a bound was exceeded
LONGEST, MOST = 86_400, 10**9  # seconds, and anything that is counted
DTYPES = ("float32", "float16", "bfloat16")
INPUTS = ("random", "repeated", "collinear", "deep", "mixed")  # of mlx_kda.ops.reference64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)

    def kind(name: str, what: str) -> argparse.ArgumentParser:
        return kinds.add_parser(name, help=what, description=what)

    op = kind("op", "the op's paths against mlx-lm's, with the error beside the time")
    timed(op)
    numbers(op, "--tokens", [1, 64, 512, 2048], "tokens")
    numbers(op, "--heads", [4, 32], "heads")
    count(op, "--dim", 128, "Dk and Dv")
    count(op, "--batch", 1, "sequences in the batch")
    choice(op, "--dtype", DTYPES, "float32", "dtype of the activations")
    choice(op, "--row", INPUTS, "random", "kind of inputs")
    op.add_argument("--paths", default="auto", help="paths of kda() to measure (default: auto)")

    model = kind("model", "prefill and decode of a model against mlx-lm's class")
    add_subject(model)
    timed(model)
    numbers(model, "--contexts", [1024, 8192], "tokens in the context")
    choice(model, "--candidates", ("both", "ours", "mlx-lm"), "both", "whose model classes to run")

    buffers = kind("buffers", "prefill and decode with MLX's command buffers of several lengths")
    add_subject(buffers)
    timed(buffers)
    count(buffers, "--context", 1024, "tokens in the context")
    count(buffers, "--rounds", 3, "processes per setting")
    for parser in (op, model, buffers):
        add_output(parser, plot=parser is not buffers)

    everything = kind("all", "op, model and, on a GPU, buffers, as one Markdown page")
    everything.add_argument("--report", metavar="FILE", required=True, help="page to write")
    everything.add_argument(
        "--model",
        metavar="MODEL",
        help="folder of a checkpoint (default: the small one, converted)",
    )
    numbers(everything, "--tokens", [1, 64, 512, 2048], "tokens for the op")
    seconds(everything, 10.0)


def run(args: argparse.Namespace) -> int:
    with exit_on_signals():  # SIGTERM too: temporary folders are removed
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    if args.kind == "op":
        return _op(args)
    if args.kind == "model":
        subject = subject_of(args)
        from ..bench import model

        names = model.CANDIDATES if args.candidates == "both" else (args.candidates,)
        chosen = {"contexts": args.contexts, "samples": args.samples, "budget": args.budget}
        return measure(model.BENCHMARK, model.of(subject, names, **chosen), args)
    if args.kind == "buffers":
        subject_of(args).prepare()
        from ..bench import buffers

        given = {name: getattr(args, name) for name in (*_SUBJECT, "samples", "budget")}
        told = [f"--{n.replace('_', '-')}={v}" for n, v in given.items() if v is not None]
        folder = [] if args.model is None else [args.model]
        arguments = [*folder, *told, f"--contexts={args.context}"]
        return measure(buffers.BENCHMARK, buffers.run(arguments, args.rounds), args)
    return _all(args)


def _op(args: argparse.Namespace) -> int:
    from ..attention import PATHS
    from ..bench import op

    paths = args.paths.split(",")
    unknown = [path for path in paths if path not in PATHS]
    if unknown:
        raise UserError(f"--paths takes {', '.join(PATHS)}, got {unknown[0]!r}")
    names = ("dim", "batch", "dtype", "row", "samples", "budget")
    chosen = {name: getattr(args, name) for name in names}
    return measure(op.BENCHMARK, op.run(args.tokens, args.heads, paths=paths, **chosen), args)


def _all(args: argparse.Namespace) -> int:
    loading.check_writable(args.report, "--report")
    if args.model is not None:
        loading.check_model(args.model)
    from ..bench import machine, page

    about = machine.describe(command())
    with tempfile.TemporaryDirectory(prefix="mlx-kda-bench-") as scratch:
        folder = args.model or page.small_model(Path(scratch))
        sections = page.measured(collect, folder, args.tokens, args.budget, about)
        page.write(Path(args.report), about, (section for _, section in sections), note)
    note(f"wrote {args.report}")
    return 0


def measure(
    benchmark: "Benchmark",
    rows: "Rows",
    args: argparse.Namespace,
    *,
    page: "Callable[[dict[str, Any], list[Row]], str] | None" = None,
    broken: "Callable[[list[Row]], list[str]]" = lambda rows: [],
) -> int:
    """Measure, print the table, and write what the options ask for.

    Args:
        benchmark, rows: what is measured.
        args: with ``out``, and with ``plot`` and ``report`` where there are these options.
        page: (machine, rows) -> the Markdown page for --report.
        broken: rows -> a line for every bound that was exceeded.

    Returns:
        The exit status: `NOT_KEPT` where a bound was exceeded.
    """
    from ..bench import machine, results

    report, plot = getattr(args, "report", None), getattr(args, "plot", False)
    loading.check_writable(report, "--report")
    if plot and not args.out:
        raise UserError("--plot draws beside the results: give --out DIR too")
    told = command(getattr(args, "scratch", None))

    @cache
    def about() -> dict[str, Any]:
        return machine.describe(told)

    saving = results.Saving(Path(args.out), benchmark.name, about) if args.out else None
    try:
        found = collect(benchmark, rows, saving.add if saving else None)
    except BaseException:
        if saving:
            saving.close()
            if saving.path.is_file():
                note(f"rows so far: {saving.path}")
        raise
    # Files first: a closed pipe ends the printing.
    written = list(saving.finish()) if saving else []
    if page is not None and report:
        write_text(Path(report), page(about(), found))
        written.append(Path(report))
    if plot:
        written += results.plot(written[0])
    print(results.markdown(found, benchmark.columns))
    if benchmark.note:
        note(benchmark.note)
    for path in written:
        note(f"wrote {path}")
    exceeded = broken(found)
    for line in exceeded:
        note(f"bound exceeded: {line}")
    return NOT_KEPT if exceeded else 0


def collect(
    benchmark: "Benchmark", rows: "Rows", keep: "Callable[[Row], None] | None" = None
) -> "list[Row]":
    """All rows, each printed on standard error and passed to ``keep`` as it comes."""
    from ..bench import results

    found = []
    for row in rows:
        note("  ".join(results.show(row.get(key)) for key in benchmark.columns).rstrip())
        found.append(row)
        if keep is not None:
            keep(row)
    if noise := results.noise(found):
        note(f"{noise}: this machine was busy, run again before quoting them")
    return found


def count(
    parser: argparse.ArgumentParser, option: str, default: int, what: str, low: int = 1
) -> None:
    """Add an option that takes a whole number."""
    parse = options.number(int, low, MOST)
    options.add_option(parser, option, "N", parse, f"{what} (default: {default})", default)


def numbers(parser: argparse.ArgumentParser, option: str, default: list[int], what: str) -> None:
    """Add an option that takes whole numbers, as in 1,512,2048."""
    told = f"{what} (default: {','.join(map(str, default))})"
    options.add_option(parser, option, "N,N", options.numbers, told, default)


def choice(
    parser: argparse.ArgumentParser, option: str, choices: tuple[str, ...], default: str, what: str
) -> None:
    """Add an option that takes one of several words."""
    told = f"{what} (default: {default})"
    parser.add_argument(option, choices=choices, default=default, help=told)


def seconds(parser: argparse.ArgumentParser, default: float) -> None:
    """Add --budget."""
    told = "seconds per candidate and size; at least three samples are always taken "
    parse = options.number(float, 0.1, LONGEST)
    options.add_option(parser, "--budget", "S", parse, f"{told}(default: {default:g})", default)


def timed(parser: argparse.ArgumentParser) -> None:
    """Add the options of what is timed."""
    count(parser, "--samples", 7, "samples per candidate and size", low=3)
    seconds(parser, 20.0)


def add_output(parser: argparse.ArgumentParser, plot: bool = False, report: bool = False) -> None:
    """Add the options of what is written."""
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write rows to this folder as JSON and CSV, as they are measured",
    )
    if plot:
        parser.add_argument(
            "--plot",
            action="store_true",
            help="also plot them there as SVG and PNG (needs mlx-kda[plot])",
        )
    if report:
        parser.add_argument("--report", metavar="FILE", help="Markdown page to write")


_SUBJECT = ("shape", "layers", "vocab", "q_bits", "dtype", "runner", "device")


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a model, and what runs it."""
    number = options.number(int, 1, MOST)
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="folder of a checkpoint; without it, give --shape"
    )
    parser.add_argument("--shape", choices=("48b",), help="a random model of this shape instead")
    parser.add_argument("--layers", type=number, metavar="N", help="use its first N layers only")
    parser.add_argument("--vocab", type=number, metavar="N", help="size of its vocabulary")
    bits = options.one_of(4, 8)
    options.add_option(
        parser, "--q-bits", "N", bits, "bits of its weights (default: not quantised)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of its activations (default: bfloat16)"
    )
    parser.add_argument("--runner", default="auto", help="what runs the KDA layers (default: auto)")
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), help="what MLX computes on (default: MLX's own choice)"
    )


def subject_of(args: argparse.Namespace) -> "Subject":
    """The model that the options of `add_subject` name."""
    if args.model is not None and args.shape is None:
        loading.check_model(args.model)
    from ..bench.subject import Subject

    return Subject(args.model, **{name: getattr(args, name) for name in _SUBJECT})


# Environment variables of MLX that change times or results.
_SETTINGS = (
    *("MLX_ENABLE_TF32", "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER", "MLX_BFS_MAX_WIDTH"),
    *("MLX_DISABLE_COMPILE", "MLX_METAL_FAST_SYNCH", "MLX_USE_CUDA_GRAPHS"),
)


def command(scratch: str | None = None) -> str:
    """The command line that runs this again, with MLX's settings in the environment.

    Results are published: of an absolute path only the name is shown, and ``scratch``, the name of
    a folder for temporary files, is shown as FOLDER.
    """
    from .main import MLX_SETTINGS

    told = ["FOLDER" if a == scratch else _name(a) for a in sys.argv[1:]]
    script = Path(sys.argv[0])
    program = ["python", f"benchmarks/{script.name}"] if script.parent.name == "benchmarks" else []
    settings = [
        f"{name}={shlex.quote(os.environ[name])}"
        for name in _SETTINGS
        if name in os.environ and os.environ[name] != MLX_SETTINGS.get(name)
    ]
    return " ".join([*settings, shlex.join([*(program or ["mlx-kda"]), *told])])


def _name(argument: str) -> str:
    option, equals, value = argument.rpartition("=") if argument[:2] == "--" else ("", "", argument)
    return option + equals + (Path(value).name if value[:1] == "/" else value)
