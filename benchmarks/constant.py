"""Whether a pure KDA model's memory is constant: one long text read in chunks, memory at intervals.

    python benchmarks/constant.py examples/tiny-fla-kda --text examples/train/held_out.txt \\
        --report docs/constant-memory.md

The text is repeated until there are enough tokens. Then a question is asked in the same context,
which shows that the state is still of use. Exits with 1 where memory grew beyond its bounds.
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import add_output, count, read_text, run
from memory import live_arrays, peak_resident, resident

from mlx_kda.bench import machine
from mlx_kda.bench.results import Benchmark, columns, markdown
from mlx_kda.cli import loading
from mlx_kda.cli.measure import measure
from mlx_kda.context import Context
from mlx_kda.errors import UserError
from mlx_kda.models import load

QUESTION = "What is an anchor?"
# How much a number may grow over the run. Resident memory holds Python's list of the ids read (8
# bytes each) and what the allocators keep.
ROOM_MB = {"active_mb": 0.1, "mlx_peak_mb": 1.0, "resident_mb": 4.0}
COLUMNS = columns(
    "tokens cache_bytes arrays active_mb mlx_peak_mb resident_mb peak_mb tokens_per_second",
    cache_bytes="cache bytes",
    arrays="live arrays",
    active_mb="MLX active MB",
    mlx_peak_mb="MLX peak MB",
    resident_mb="resident MB",
    peak_mb="highest resident MB",
    tokens_per_second="tokens/s",
)
BENCHMARK = Benchmark(
    "constant", "Whether a pure KDA model's memory stays the same over a long text", COLUMNS
)

STEP = 512


def rows(model: str | Path, text: str, tokens: int, every: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of `read`; the last also names the model and has its answer."""
    loaded, tokenizer = load(model)
    if not all(layer.is_linear for layer in loaded.layers):
        raise UserError(f"{model} has layers that are not KDA: its memory is not constant")
    ids = tokenizer.encode(text)
    if not ids:
        raise UserError("the text is empty: there is nothing to read")
    context = Context(loaded)
    for row in read(context, ids, tokens, every=every):
        if row["tokens"] == tokens:
            row |= {"model": Path(model).name, "answer": ask(context, tokenizer, QUESTION)}
        yield row


def read(
    context: Context, ids: Sequence[int], tokens: int, *, every: int, step: int = STEP
) -> Iterator[dict[str, Any]]:
    """Read ``tokens`` tokens, repeating ``ids``; yield a row of memory after ``every`` tokens.

    MLX's peak is that since the row before.
    """
    done = 0
    while done < tokens:
        mx.reset_peak_memory()
        start, count = time.perf_counter(), min(every, tokens - done)
        context.prefill([ids[i % len(ids)] for i in range(done, done + count)], step=step)
        seconds = time.perf_counter() - start
        done += count
        gc.collect()
        yield {
            "tokens": done,
            "cache_bytes": context.nbytes,
            "arrays": live_arrays(),
            "active_mb": mx.get_active_memory() / 1e6,
            "mlx_peak_mb": mx.get_peak_memory() / 1e6,
            "resident_mb": resident() / 1e6,
            "peak_mb": peak_resident() / 1e6,
            "tokens_per_second": count / seconds,
        }


def ask(context: Context, tokenizer: Any, question: str, limit: int = 48) -> str:
    """The greedy answer to a question in a context that has read something."""
    turn = [{"role": "user", "content": question}]
    context.prefill(tokenizer.apply_chat_template(turn, add_generation_prompt=True))
    ids = []
    for token in context.decode(limit):
        if token in tokenizer.eos_token_ids:
            break
        ids.append(token)
    return tokenizer.decode(ids)


def growth(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What grew after the first row, in words; [] where nothing did."""
    first, last = rows[0], rows[-1]
    found = [
        f"{COLUMNS[key]}: {first[key]:,} -> {row[key]:,}"
        for key in ("cache_bytes", "arrays")
        for row in rows
        if row[key] != first[key]
    ]
    for key, room in ROOM_MB.items():
        if last[key] > first[key] + room:
            found.append(f"{COLUMNS[key]}: {first[key]:.1f} -> {last[key]:.1f}")
    return found


PAGE = """\
# Constant memory, measured

`{model}` reads {tokens:,} tokens in one context. Every layer is
KDA, so its cache is a state and three windows per layer, however long the text is.

- command: `{command}`
- {date}, commit {commit}, {packages}
- {chip}, {device}, {cores} cores, {system}

{table}

Bounds: the cache's bytes and the number of live arrays are the same in every row.
Memory in the last row is above that in the first at most by: {rooms}.
Out of these bounds: {grew}.

Resident memory changed by {change:+.1f} MB;
Python's list of the ids took {ids:.1f} MB
of that, the rest is not accounted for (the arrays and MLX's memory are, above).
MLX's peak is that since the row before. The machine may have had other work, so the
speeds are no measurement.

Asked in the same context after all of it, {question!r}, the model answers (greedy):

> {answer}
"""


def page(about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """docs/constant-memory.md; the last row names the model and has its answer."""
    first, last = rows[0], rows[-1]
    rooms = [f"{COLUMNS[key].removesuffix(' MB')} by {mb:g} MB" for key, mb in ROOM_MB.items()]
    facts = {
        "packages": machine.packages(about),
        "table": markdown(rows, COLUMNS),
        "rooms": ", ".join(rooms),
        "grew": "; ".join(growth(rows)) or "nothing",
        "change": last["resident_mb"] - first["resident_mb"],
        "ids": 8e-6 * (last["tokens"] - first["tokens"]),
        "question": QUESTION,
    }
    return PAGE.format(**{**about, **last, **facts})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of a pure KDA model")
    parser.add_argument("--text", required=True, metavar="FILE", help="read repeatedly, in UTF-8")
    count(parser, "--tokens", 200_000, "tokens of the text")
    count(parser, "--every", 20_000, "tokens between two rows")
    add_output(parser, report=True)


def main(args: argparse.Namespace) -> int:
    loading.check_model(args.model)
    found = rows(args.model, read_text(args.text), args.tokens, args.every)
    return measure(BENCHMARK, found, args, page=page, broken=growth)


if __name__ == "__main__":
    sys.exit(run(__doc__, add_arguments, main))
