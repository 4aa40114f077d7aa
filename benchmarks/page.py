"""docs/benchmarks.md: all that this machine can measure or count, with results of other machines.

    python benchmarks/page.py --report docs/benchmarks.md --budget 5 \\
        --recorded docs/results/h200.json --recorded docs/results/h200-profile.json \\
        --recorded docs/results/h200-model.json

Runs op, model, buffers (on a GPU), profile_model, conversion, launches and counters.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import conversion
import counters
import cuda_peers
import launches
import profile_model
from common import numbers, run, seconds

from mlx_kda.bench import machine, model, page, results
from mlx_kda.bench.results import Row
from mlx_kda.bench.subject import Subject
from mlx_kda.cli import loading
from mlx_kda.cli.measure import collect, command
from mlx_kda.cli.output import note
from mlx_kda.demo import find_checkpoint
from mlx_kda.errors import UserError

Document = dict[str, Any]


def sections(
    args: argparse.Namespace, folder: str, about: dict[str, Any], recorded: dict[str, list[str]]
) -> Iterator[str]:
    """Yield the sections of the page in their order, each once it is measured."""
    for name, section in page.measured(collect, folder, args.tokens, args.budget, about):
        yield section
        yield from recorded[name]
    found = profile_model.rows(Subject(folder), samples=5, budget=args.budget)
    what = Path(args.model).name if args.model else "the small checkpoint"
    yield profile(collect(profile_model.BENCHMARK, found), about, what)
    yield DONE
    yield from recorded["profile"]
    if (source := _source(args)) is not None:
        found = conversion.rows(source, q_bits=4)
        yield page.section(conversion.BENCHMARK, collect(conversion.BENCHMARK, found), about)
    found = launches.rows()
    yield page.section(launches.BENCHMARK, collect(launches.BENCHMARK, found), about)
    counted = collect(counters.BENCHMARK, counters.rows())
    yield page.section(counters.BENCHMARK, counted, about)
    if about["device"] != "Metal GPU":
        yield counters.predictions(counted)
    yield from recorded["cuda"]
    yield UNKNOWN


def _source(args: argparse.Namespace) -> Path | None:
    """The checkpoint to convert: the one named, else the small one if it is there."""
    try:
        return find_checkpoint(args.source)
    except UserError:
        return None


def profile(rows: list[Row], about: dict[str, Any], what: str, remarks: str = "") -> str:
    """A section on where the time goes, prefill beside decode."""
    return page.joined(
        f"## Where the time goes: {what}, {about['device']}",
        f"{about['chip']}. A prefill of {rows[0]['tokens']:,} tokens, and a decode step after it.",
        profile_model.table(rows),
        profile_model.BENCHMARK.note,
        profile_model.largest(rows),
        remarks,
        page.unsteady(rows, about),
    )


def read_recorded(files: list[str]) -> defaultdict[str, list[str]]:
    """Benchmark -> sections of what was saved of it on other machines."""
    found = defaultdict(list)
    for file in files:
        document = results.load(Path(file))
        name = document["benchmark"]
        if name not in RECORDED:
            raise UserError(
                f"{file} holds results of {name}: only those of {', '.join(sorted(RECORDED))} are "
                "added from another machine"
            )
        try:
            found[name].append(RECORDED[name](document))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            raise UserError(f"{file} lacks what {name} saves: {e!r}") from e
    return found


def _recorded_profile(document: Document) -> str:
    about = document["machine"]
    what = f"on another machine, {about['date']}: `{about['command']}`"
    return profile(document["rows"], about, what, _remarks(document))


def _recorded_model(document: Document) -> str:
    about, rows = document["machine"], document["rows"]
    return page.joined(
        f"### On another machine, {about['device']}: `{about['command']}`",
        f"{about['chip']}, {about['system']}, {about['date']}.",
        results.markdown(rows, model.BENCHMARK.columns),
        _remarks(document),
        page.unsteady(rows, about),
    )


def _recorded_cuda(document: Document) -> str:
    about = document["machine"]
    return page.joined(
        f"## On CUDA, another machine: `{about['command']}`",
        f"{about['chip']}, {about['system']}, {machine.packages(about)}, {about['date']}. "
        + cuda_peers.BENCHMARK.note,
        cuda_peers.tables(document["rows"]),
        _remarks(document),
    )


def _remarks(document: Document) -> str:
    """The note that was added to the file by hand, and whether its rows are complete."""
    stopped = "" if document.get("complete", True) else page.STOPPED
    return " ".join(part for part in (document.get("note", ""), stopped) if part)


RECORDED: dict[str, Callable[[Document], str]] = {
    "cuda": _recorded_cuda,
    "model": _recorded_model,
    "profile": _recorded_profile,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", metavar="FILE", required=True, help="page to write")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder of a checkpoint (default: the small one, converted)",
    )
    parser.add_argument(
        "--source",
        metavar="SRC",
        help="folder of the checkpoint to convert (default: the small one)",
    )
    numbers(parser, "--tokens", [1, 64, 512, 2048], "tokens for the op")
    seconds(parser, 10.0)
    parser.add_argument(
        "--recorded",
        metavar="FILE",
        action="append",
        default=[],
        help="JSON of cuda_peers, model or profile_model from another machine, to add; may be "
        "repeated",
    )


def main(args: argparse.Namespace) -> None:
    loading.check_writable(args.report, "--report")
    if args.model is not None:
        loading.check_model(args.model)
    if args.source is not None:
        loading.check_folder(args.source)
    recorded, about = read_recorded(args.recorded), machine.describe(command())
    with tempfile.TemporaryDirectory(prefix="mlx-kda-bench-") as scratch:
        folder = args.model or page.small_model(Path(scratch))
        page.write(Path(args.report), about, sections(args, folder, about, recorded), note)
    note(f"wrote {args.report}")


DONE = """### What was done about the first entries

- Products of weights: float32 weights are laid out at load for the CPU's BLAS
  (`mlx_kda/layers/blas_layout.py`), where a product is then a loop of vector updates instead of dot
  products. A column of weights as stored, where there is one, is the same model without. What is
  left of them there is that BLAS.
- A decode step's many small operations: what a KDA layer does between its projections is compiled
  into one function (`mlx_kda/layers/mix.py`), its maps of one input are one product, and a norm of
  few rows is three operations instead of nine.
- exp, in every gate and softmax: long arrays take a form that the compiler turns into vector
  instructions (`mlx_kda/ops/elementwise.py`).
- Attention of a prefill: on the CPU in blocks of rows, each with the keys that it sees.
- On a GPU the layer between its projections is one kernel in decoding, a few in prefill, and the
  router one. Gate and up of the experts are one product, as far as MLX's product reaches."""

UNKNOWN = """## What is not known

- How fast any of this is on an Apple GPU: `mlx-kda bench all --report FILE` on a Mac settles it.
- What launches cost there: the table counts them, it does not time them.
- How many of them a command buffer should hold. MLX ends one after 40 or 50 launches or as many
  million numbers of input, all experts of a layer counted: a decode step of the 48B is many of
  them. Others measured 5 to 8 % with other limits on an M3 Ultra, on another model
  (ml-explore/mlx#4521), and no gain on an M5 (lablup/mlxcel#353): `mlx-kda bench buffers MODEL`
  tells for a Mac.
- MLX's Linux CPU build multiplies matrices by a plain BLAS: CPU times say little about a Mac."""


if __name__ == "__main__":
    sys.exit(run(__doc__, add_arguments, main))
