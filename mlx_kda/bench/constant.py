"""Whether a pure KDA model's memory is constant: one long text read in chunks, memory at intervals.

    mlx-kda bench constant examples/tiny-fla-kda --text examples/train/held_out.txt \\
        --report docs/constant-memory.md

The text is repeated until there are enough tokens. After it a question is asked in the same
context, so that the state is known to be still of use.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..context import Context
from ..errors import UserError
from .constant_page import QUESTION
from .endurance import live_arrays
from .memory import peak_resident, resident

STEP = 512


def run(model: str | Path, text: str, tokens: int, every: int) -> Iterator[dict[str, Any]]:
    """Rows of ``read``; the last one also names the model and has its answer to the question."""
    from ..models import load

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
