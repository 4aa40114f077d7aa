"""`bench all`: one Markdown page of everything that this machine can measure or count."""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import write_text
from . import cuda_tables, machine, profile_tables, results

# A model's folder and not a shape, on MLX's own device.
_FOLDER = {
    "shape": None,
    "layers": None,
    "vocab": None,
    "q_bits": 0,
    "dtype": "bfloat16",
    "runner": "auto",
    "device": None,
}
# What each table of the page is run with, beside the options of `bench all`.
_PLAN: dict[str, dict[str, Any]] = {
    "op": {
        "heads": [4, 32],
        "dim": 128,
        "batch": 1,
        "dtype": "float32",
        "row": "random",
        "paths": "auto",
        "samples": 7,
    },
    "model": {**_FOLDER, "contexts": [256, 1024], "samples": 5},
    "buffers": {**_FOLDER, "context": 1024, "rounds": 3, "samples": 3},
    "profile": {**_FOLDER, "tokens": 512, "samples": 5},
    "convert": {"q_bits": 4, "samples": 3},
    "launches": {"q_bits": 4},
    "counters": {"tokens": 64, "dim": 128, "dtype": "bfloat16"},
}


def write(path: Path, command: str, args: argparse.Namespace, run_one: Callable) -> None:
    """Run the kinds of `_PLAN` and write the page; ``run_one(benchmark, options)`` gives rows."""
    from ..cli.benchmarks import BENCHMARKS

    recorded = _read(args.recorded)
    about = machine.describe(command)
    parts = [_head(about)]
    with tempfile.TemporaryDirectory(prefix="mlx-kda-bench-") as scratch:
        source = _source(args)
        model = args.model or _small_model(Path(scratch))
        given = {"tokens": args.tokens, "budget": args.budget, "model": model, "source": source}
        for name, plan in _PLAN.items():
            if name == "convert" and source is None:
                continue
            if name == "buffers" and about["device"] != "Metal GPU":
                continue  # nothing else has any
            benchmark = BENCHMARKS[name]
            options = argparse.Namespace(**{**given, **plan})
            rows = run_one(benchmark, options)
            if name == "profile":
                parts.append(_profile(rows, about, args.model or "the small checkpoint"))
            else:
                columns, note = benchmark.columns, benchmark.note
                parts.append(_section(benchmark.what, columns, note, rows, about))
            parts += [_RECORDED[name](document) for document in recorded[name]]
            if name == "profile":
                parts.append(_DONE)
    parts += [_cuda(document) for document in recorded["cuda"]]
    parts.append(_predicted(rows) if about["device"] != "Metal GPU" else "")
    parts.append(_UNKNOWN)
    try:
        write_text(path, "\n\n".join(part for part in parts if part) + "\n")
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}") from e


def _source(args: argparse.Namespace) -> str | None:
    """The checkpoint to convert: the one named, else the small one if it is there."""
    from ..demo import find_checkpoint

    try:
        return args.source or str(find_checkpoint(None))
    except UserError:
        return None


def _small_model(scratch: Path) -> str:
    from ..convert import convert
    from ..demo import find_checkpoint

    out = scratch / "tiny-kimi-linear"
    convert(find_checkpoint(None, "bench all --model MODEL"), out, dtype="float32")
    return str(out)


def _head(about: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    return f"""# Benchmarks

Written by `{about["command"]}` on {about["date"]}, commit {about["commit"] or "unknown"}.

- {about["chip"]} ({about["device"]}), {about["cores"]} cores, {about["memory_gb"]} GB
- {about["system"]}, Python {about["python"]}, {packages}

Times compare only within a table: candidates took turns in one process. Numbers of another machine
stand under a heading that names it. **Nothing here was measured on an Apple GPU unless the line
above says Metal.**"""


def _section(what, columns, note, rows, about) -> str:
    title = f"## {what[0].upper()}{what[1:]}"
    parts = [title, results.markdown(rows, columns), note, _noise(rows, about)]
    return "\n\n".join(part for part in parts if part)


def _noise(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    noisy = sum(row.get("steady") is False for row in rows)
    if not noisy:
        return ""
    return (
        f"{noisy} of {len(rows)} rows spread over more than 5 % of their median: the machine "
        f"({about['cores']} cores) was not quiet."
    )


def _profile(rows: list[dict[str, Any]], about: dict[str, Any], what: str, note: str = "") -> str:
    """Where the time goes, prefill beside decode."""
    from ..cli.benchmarks import BENCHMARKS

    parts = [
        f"## Where the time goes: {what}, {about['device']}",
        f"{about['chip']}. A prefill of {rows[0]['tokens']:,} tokens, and a decode step after it.",
        profile_tables.table(rows),
        BENCHMARKS["profile"].note,
        profile_tables.largest(rows),
        note,
        _noise(rows, about),
    ]
    return "\n\n".join(part for part in parts if part)


def _read(files: list[str]) -> defaultdict[str, list[dict[str, Any]]]:
    """Benchmark -> what `bench` saved of it on other machines."""
    found = defaultdict(list)
    for file in files:
        document = results.load(Path(file))
        if document["benchmark"] not in _RECORDED:
            raise UserError(
                f"{file} holds results of bench {document['benchmark']}: only those of "
                f"{', '.join(sorted(_RECORDED))} are added from another machine"
            )
        found[document["benchmark"]].append(document)
    return found


def _recorded_profile(document: dict[str, Any]) -> str:
    about = document["machine"]
    return _profile(document["rows"], about, f"`{about['command']}`", _remarks(document))


def _recorded_model(document: dict[str, Any]) -> str:
    from ..cli.benchmarks import BENCHMARKS

    about, rows = document["machine"], document["rows"]
    title = f"### On another machine, {about['device']}: `{about['command']}`"
    where = f"{about['chip']}, {about['system']}, {about['date']}."
    table = results.markdown(rows, BENCHMARKS["model"].columns)
    parts = (title, where, table, _remarks(document), _noise(rows, about))
    return "\n\n".join(part for part in parts if part)


def _remarks(document: dict[str, Any]) -> str:
    """What somebody wrote into the file about its rows, and whether they are all."""
    stopped = "" if document.get("complete", True) else "The run was stopped before its end."
    return " ".join(part for part in (document.get("note", ""), stopped) if part)


def _cuda(document: dict[str, Any]) -> str:
    about = document["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    from ..cli.benchmarks import BENCHMARKS

    note = BENCHMARKS["cuda"].note
    return f"""## On CUDA, another machine: `{about["command"]}`

{about["chip"]}, {about["system"]}, {packages}, {about["date"]}. {note}

{cuda_tables.markdown(document["rows"])}

{_remarks(document)}""".rstrip()


_RECORDED = {"cuda": _cuda, "model": _recorded_model, "profile": _recorded_profile}


def _predicted(rows: list[dict[str, Any]]) -> str:
    """Prefill of the recurrence on Apple chips by the counters' model, named a prediction."""
    lines = list(_predictions(rows))
    if not lines:
        return ""
    table = results.markdown(
        lines,
        {"chip": "chip", "candidate": "kernel", "low": "us a token, at least", "high": "at most"},
    )
    return f"""## Predicted, not measured: the recurrence of one KDA layer on Apple chips

{table}

For 32 heads of 128 x 128, from the counters above: core-cycles of ALU and L1 fully overlapped (at
least) or not at all (at most), over cores x clock. A model of M1-class cores; it knows nothing of
memory bandwidth beyond the cores, of launches, or of how well a compiler does."""


# GPU cores and clock in GHz, from public specifications and measurements.
_CHIPS = {"M1 Max": (32, 1.3), "M3 Ultra": (80, 1.4), "M4 Max": (40, 1.58)}


def _predictions(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    wanted = ("ours chunk exact", "ours chunk half", "mlx-lm gated_delta_step_vec")
    for chip, (cores, clock) in _CHIPS.items():
        for row in rows:
            if row["candidate"] in wanted:
                scale = 32 / (cores * clock * 1e3)
                yield {
                    "chip": chip,
                    "candidate": row["candidate"],
                    "low": row["overlapped"] * scale,
                    "high": row["serial"] * scale,
                }


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
- How many of them a command buffer should hold. MLX ends one after some 50 launches or 50 million
  numbers of input, all experts of a layer counted: a decode step of the 48B is many of them. Others
  measured 5 to 8 % with other limits on an M3 Ultra, on another model (ml-explore/mlx#4521), and no
  gain on an M5 (lablup/mlxcel#353): `mlx-kda bench buffers MODEL` tells for a Mac.
- MLX's Linux CPU build multiplies matrices by a plain BLAS: CPU times say little about a Mac."""
