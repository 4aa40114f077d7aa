"""Whether a pure KDA model's memory is constant: one long text read in chunks, memory at intervals.

    python -m mlx_kda.bench.constant examples/tiny-fla-kda --tokens 200000 \\
        --text examples/train/held_out.txt --page docs/constant-memory.md

The text is repeated until there are enough tokens. After it a question is asked in the same
context, so that the state is known to be still of use. Ends with 1 if anything grew.
"""

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..context import Context
from ..errors import UserError
from ..files import write_text
from . import machine, results
from .endurance import live_arrays, peak_resident, resident

QUESTION = "What is an anchor?"
STEP = 512
# How much more a number may be at the end than at first. Resident memory holds Python's list of the
# ids read (8 bytes each) and what the allocators keep.
ROOM_MB = {"active_mb": 0.1, "mlx_peak_mb": 1.0, "resident_mb": 4.0}
COLUMNS = {
    "tokens": "tokens",
    "cache_bytes": "cache bytes",
    "arrays": "live arrays",
    "active_mb": "MLX active MB",
    "mlx_peak_mb": "MLX peak MB",
    "resident_mb": "resident MB",
    "peak_mb": "highest resident MB",
    "tokens_per_second": "tokens/s",
}


def read(
    context: Context, ids: Sequence[int], tokens: int, *, every: int, step: int = STEP
) -> Iterator[dict[str, Any]]:
    """Read ``tokens`` tokens, ``ids`` over and over; a row of memory after every so many.

    The peak of MLX is that since the row before.
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


def page(about: dict[str, Any], name: str, rows: Sequence[dict[str, Any]], answer: str) -> str:
    """The page for docs/."""
    grew, first, last = growth(rows), rows[0], rows[-1]
    rooms = ", ".join(f"{COLUMNS[key]} by {room:g}" for key, room in ROOM_MB.items())
    packages = ", ".join(f"{k} {v}" for k, v in about["packages"].items())
    return "\n".join(
        [
            "# Constant memory, measured",
            "",
            f"`{name}` reads {rows[-1]['tokens']:,} tokens in one context. Every layer is KDA, so",
            "its cache is a state and three windows a layer, whatever the length of the text.",
            "",
            f"- command: `{about['command']}`",
            f"- {about['date']}, commit {about['commit']}, {packages}",
            f"- {about['chip']}, {about['device']}, {about['cores']} cores, {about['system']}",
            "",
            results.markdown(rows, COLUMNS),
            "",
            f"Beyond bounds after the first row: {'; '.join(grew) if grew else 'nothing'}.",
            f"Cache bytes and live arrays may not change at all, and may grow: {rooms}.",
            "",
            f"Resident memory changed by {last['resident_mb'] - first['resident_mb']:+.1f} MB;",
            f"Python's list of the ids took {8e-6 * (last['tokens'] - first['tokens']):.1f} MB",
            "of that, the rest is not accounted for (the arrays and MLX's memory are, above).",
            "MLX's peak is that since the row before. The machine may have had other work, so the",
            "speeds are no measurement.",
            "",
            f"Asked in the same context after all of it, {QUESTION!r}, the model answers (greedy):",
            "",
            f"> {answer}",
            "",
        ]
    )


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run it, print the table, write the page."""
    parser = argparse.ArgumentParser(prog="mlx_kda.bench.constant", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", type=Path, help="folder of a pure KDA model")
    parser.add_argument("--text", type=Path, required=True, help="text to read, over and over")
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--every", type=int, default=20_000, help="tokens between two rows")
    parser.add_argument("--page", type=Path, help="Markdown file to write")
    args = parser.parse_args(argv)

    from ..models import load

    model, tokenizer = load(args.model)
    if not all(layer.is_linear for layer in model.layers):
        raise UserError(f"{args.model} has layers that are not KDA: its memory is not constant")
    context = Context(model)
    ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))
    rows = []
    for row in read(context, ids, args.tokens, every=args.every):
        rows.append(row)
        print("  ".join(results.show(row[key]) for key in COLUMNS), file=sys.stderr, flush=True)
    answer = ask(context, tokenizer, QUESTION)
    command = shlex.join(["python", "-m", "mlx_kda.bench.constant", *(argv or sys.argv[1:])])
    text = page(machine.describe(command), args.model.name, rows, answer)
    print(text)
    if args.page:
        args.page.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.page, text)
    return 1 if growth(rows) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"mlx_kda.bench.constant: {error}")
