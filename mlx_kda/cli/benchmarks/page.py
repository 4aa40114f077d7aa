"""`bench all`: one Markdown page of everything that this machine can measure or count."""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...bench import cuda_tables, machine, predictions, profile_tables, results
from ...errors import UserError
from ...files import write_text
from ..output import note
from . import BENCHMARKS, Benchmark

Document = dict[str, Any]


def write(path: Path, command: str, args: argparse.Namespace, run_one: Callable) -> None:
    """Run everything and write the page; ``run_one(benchmark, options)`` gives rows.

    What there is when it is stopped goes to a file beside it, with ".partial" in its name.
    """
    recorded = _recorded(args.recorded)
    about = machine.describe(command)
    parts = [_head(about)]
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        with tempfile.TemporaryDirectory(prefix="mlx-kda-bench-") as scratch:
            model = args.model or _small_model(Path(scratch))
            for name, arguments in _plan(args, model, about["device"]).items():
                benchmark = BENCHMARKS[name]
                rows = run_one(benchmark, _options(benchmark, arguments))
                if name == "profile":
                    what = Path(args.model).name if args.model else "the small checkpoint"
                    parts += [_profile(rows, about, what), _DONE]
                else:
                    parts.append(_section(benchmark, rows, about))
                parts += recorded[name]
                if name == "counters" and about["device"] != "Metal GPU":
                    parts.append(predictions.markdown(rows))
    except BaseException:
        if len(parts) > 1:
            _save(partial, [*parts, "The run was stopped before its end."])
            note(f"what there is: {partial}")
        raise
    _save(path, [*parts, *recorded["cuda"], _UNKNOWN])
    partial.unlink(missing_ok=True)


def _save(path: Path, parts: list[str]) -> None:
    try:
        write_text(path, _joined(*parts) + "\n")
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}") from e


def _plan(args: argparse.Namespace, model: str, device: str) -> dict[str, list[str]]:
    """Benchmark -> its arguments, in the order of the page."""
    budget = f"--budget={args.budget}"
    plan = {
        "op": [f"--tokens={','.join(map(str, args.tokens))}", budget],
        "model": [model, "--contexts=256,1024", "--samples=5", budget],
        "buffers": [model, "--samples=3", budget],
        "profile": [model, "--samples=5", budget],
        "convert": [_source(args), "--q-bits=4"],
        "launches": [],
        "counters": [],
    }
    if device == "CPU":  # it has no command buffers
        del plan["buffers"]
    if plan["convert"][0] is None:
        del plan["convert"]
    return plan


def _options(benchmark: Benchmark, arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    return parser.parse_args(arguments)


def _source(args: argparse.Namespace) -> str | None:
    """The checkpoint to convert: the one named, else the small one if it is there."""
    from ...demo import find_checkpoint

    try:
        return args.source or str(find_checkpoint(None))
    except UserError:
        return None


def _small_model(scratch: Path) -> str:
    from ...convert import convert
    from ...demo import find_checkpoint

    out = scratch / "tiny-kimi-linear"
    convert(find_checkpoint(None, "bench all --model MODEL"), out, dtype="float32")
    return str(out)


def _head(about: dict[str, Any]) -> str:
    return f"""# Benchmarks

Written by `{about["command"]}` on {about["date"]}, commit {about["commit"] or "unknown"}.

- {about["chip"]} ({about["device"]}), {about["cores"]} cores, {about["memory_gb"]} GB
- {about["system"]}, Python {about["python"]}, {_packages(about)}

Times compare only within a table, where candidates took turns; what is marked (alone) ran by
itself. Numbers of another machine stand under a heading that says so. **Nothing here was measured
on an Apple GPU unless the line above says Metal.**"""


def _packages(about: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in about["packages"].items())


def _section(benchmark: Benchmark, rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    title = f"## {benchmark.what[0].upper()}{benchmark.what[1:]}"
    table = results.markdown(rows, benchmark.columns)
    return _joined(title, table, benchmark.note, _noise(rows, about))


def _profile(rows: list[dict[str, Any]], about: dict[str, Any], what: str, *more: str) -> str:
    """Where the time goes, prefill beside decode."""
    return _joined(
        f"## Where the time goes: {what}, {about['device']}",
        f"{about['chip']}. A prefill of {rows[0]['tokens']:,} tokens, and a decode step after it.",
        profile_tables.table(rows),
        BENCHMARKS["profile"].note,
        profile_tables.largest(rows),
        *more,
        _noise(rows, about),
    )


def _noise(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    noise = results.noise(rows)
    return f"{noise}: the machine ({about['cores']} cores) was not quiet." if noise else ""


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def _recorded(files: list[str]) -> defaultdict[str, list[str]]:
    """Benchmark -> sections of what `bench` saved of it on other machines."""
    found = defaultdict(list)
    for file in files:
        document = results.load(Path(file))
        name = document["benchmark"]
        if name not in _RECORDED:
            raise UserError(
                f"{file} holds results of bench {name}: only those of "
                f"{', '.join(sorted(_RECORDED))} are added from another machine"
            )
        try:
            found[name].append(_RECORDED[name](document))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            raise UserError(f"{file} lacks what bench {name} saves: {e!r}") from e
    return found


def _recorded_profile(document: Document) -> str:
    about = document["machine"]
    what = f"on another machine, {about['date']}: `{about['command']}`"
    return _profile(document["rows"], about, what, _remarks(document))


def _recorded_model(document: Document) -> str:
    about, rows = document["machine"], document["rows"]
    return _joined(
        f"### On another machine, {about['device']}: `{about['command']}`",
        f"{about['chip']}, {about['system']}, {about['date']}.",
        results.markdown(rows, BENCHMARKS["model"].columns),
        _remarks(document),
        _noise(rows, about),
    )


def _recorded_cuda(document: Document) -> str:
    about = document["machine"]
    return _joined(
        f"## On CUDA, another machine: `{about['command']}`",
        f"{about['chip']}, {about['system']}, {_packages(about)}, {about['date']}. "
        + BENCHMARKS["cuda"].note,
        cuda_tables.markdown(document["rows"]),
        _remarks(document),
    )


def _remarks(document: Document) -> str:
    """What somebody wrote into the file about its rows, and whether they are all."""
    stopped = "" if document.get("complete", True) else "The run was stopped before its end."
    return " ".join(part for part in (document.get("note", ""), stopped) if part)


_RECORDED = {"cuda": _recorded_cuda, "model": _recorded_model, "profile": _recorded_profile}


_DONE = """### What was done about the first entries

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

_UNKNOWN = """## What is not known

- How fast any of this is on an Apple GPU: `mlx-kda bench all --report FILE` on a Mac settles it.
- What launches cost there: the table counts them, it does not time them.
- How many of them a command buffer should hold. MLX ends one after 40 or 50 launches or as many
  million numbers of input, all experts of a layer counted: a decode step of the 48B is many of
  them. Others measured 5 to 8 % with other limits on an M3 Ultra, on another model
  (ml-explore/mlx#4521), and no gain on an M5 (lablup/mlxcel#353): `mlx-kda bench buffers MODEL`
  tells for a Mac.
- MLX's Linux CPU build multiplies matrices by a plain BLAS: CPU times say little about a Mac."""
