"""What a recipe of quantisation costs, as perplexity on a text that the model never saw.

    python benchmarks/quality.py examples/tiny-kimi-linear --text examples/train/held_out.txt \\
        --recipes source,q8,q4,q4+gates --out results

Each recipe (see quality_recipes.py) is converted into a temporary folder, loaded and evaluated.
examples/train/quality.py writes docs/quality.md from the results.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from common import add_output, read_text, run
from mlx.utils import tree_map
from quality_recipes import FAMILIES, Recipe

from mlx_kda.bench.results import Benchmark, columns
from mlx_kda.cli import loading
from mlx_kda.cli.measure import measure
from mlx_kda.convert import convert
from mlx_kda.errors import UserError
from mlx_kda.models import load

BENCHMARK = Benchmark(
    "quality",
    "Perplexity on a text, by recipe of quantisation",
    columns(
        "recipe bits_per_weight mb bits_per_byte perplexity divergence divergence_error "
        "gates_divergence gates_divergence_error",
        bits_per_weight="bits per weight",
        mb="MB",
        bits_per_byte="bits per byte",
        divergence_error="±",
        gates_divergence="of it by the gates",
        gates_divergence_error="±",
    ),
    "Divergence: from the first recipe's distributions, nats per token, ± standard error; by "
    "the gates: what quantising the gate path added to it.",
)

STEP = 512  # tokens per pass: the logits of all of them are in memory
# The default recipes; the others are compared with the first.
RECIPES = (
    "source", "q8", "q6", "q6=size", "q5", "q5=size", "q4", "q4=size", "q3", "q3=size", "q2",
    "q4+gates", "q4+gates8", "q3+gates", "q2+gates", "mxfp4", "mxfp4+gates",
    *(f"q{bits}@{family.replace(' ', '-')}" for bits in (4, 3) for family in FAMILIES),
)  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """A model's predictions of each token of a text but the first, [T - 1] float64, in nats.

    Attributes:
        nats: negative log-likelihood.
        divergence: ``sum_i p_i ln(p_i / q_i)`` of its distribution q from the first model's p,
            which shows far better than the nats how much a model has changed.
    """

    nats: np.ndarray
    divergence: np.ndarray


def rows(source: str | Path, text: str, recipes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield one row for each recipe, compared with the first.

    The first model's distributions are kept in a temporary file: 4 bytes for each token of the
    text and entry of the vocabulary. Raises UserError for an unknown recipe or too short a text.
    """
    parsed = [Recipe.parse(name) for name in recipes]
    found: dict[Recipe, Tokens] = {}
    with tempfile.TemporaryDirectory(prefix="mlx-kda-quality-") as scratch:
        for recipe in parsed:
            row, found[recipe] = judge(source, text, recipe, Path(scratch))
            without = recipe.without_gates
            if recipe.gates and without in found:
                mine, other = found[recipe], found[without]
                row |= mean("gates_nats", mine.nats - other.nats)
                row |= mean("gates_divergence", mine.divergence - other.divergence)
            yield row


def judge(
    source: str | Path, text: str, recipe: Recipe, scratch: Path
) -> tuple[dict[str, Any], Tokens]:
    """Convert by a recipe into ``scratch`` and evaluate: a row, and its values by token.

    On a CPU activations are float32, as 16-bit products are slow there: the rows differ by their
    weights alone.
    """
    start = time.perf_counter()
    out = scratch / "out"
    report = convert(source, out, **recipe.options(source, scratch), overwrite=True)
    model, tokenizer = load(out)
    if mx.default_device() == mx.cpu:
        widen(model)
    ids = tokenizer.encode(text)
    if len(ids) < 3:
        raise UserError("the text is too short: give at least three tokens")
    tokens = evaluate(model, ids, scratch / "first.npy")
    row = {
        "recipe": str(recipe),
        "words": recipe.words(),
        "bits_per_weight": report.bits_per_weight,
        "mb": report.bytes_out / 1e6,
        "bits_per_byte": float(tokens.nats.sum()) / math.log(2) / len(text.encode()),
        "perplexity": math.exp(tokens.nats.mean()),
        **mean("divergence", tokens.divergence),
        "tokens": tokens.nats.size,
        "computed_in": str(model.model.dtype).removeprefix("mlx.core."),
        "seconds": time.perf_counter() - start,
    }
    if recipe.family is not None:
        row["relative_error"] = recipe.relative_error(source)
    return row, tokens


def mean(name: str, values: np.ndarray) -> dict[str, float]:
    """The mean of values, one per token, and its standard error, as two columns."""
    error = values.std(ddof=1) / math.sqrt(values.size)
    return {name: float(values.mean()), f"{name}_error": float(error)}


def widen(model: nn.Module) -> None:
    """Make every parameter that is a float float32; packed weights keep their values."""

    def cast(x: mx.array) -> mx.array:
        return x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x

    model.update(tree_map(cast, model.parameters()))


def evaluate(model: nn.Module, ids: Sequence[int], first: Path) -> Tokens:
    """Evaluate a model on a text, compared with the distributions in the file ``first``.

    Where there is no such file, this model's are written to it and its divergence is 0.
    """
    reference = np.load(first, mmap_mode="r") if first.exists() else None
    made, at, nats, divergence = None, 0, [], []
    for logp, target in _passes(model, ids, STEP):
        nats.append(-_chosen(logp, target))
        rows = slice(at, at + target.size)
        if reference is None:
            if made is None:
                shape = (len(ids) - 1, logp.shape[-1])
                made = np.lib.format.open_memmap(first, "w+", np.float32, shape)
            made[rows] = np.array(logp)
            divergence.append(np.zeros(target.size))
        else:
            p = mx.array(reference[rows])
            terms = (mx.exp(p) * (p - logp)).sum(-1)
            divergence.append(np.array(terms, dtype=np.float64))
        at += target.size
    return Tokens(np.concatenate(nats), np.concatenate(divergence))


def _passes(model: nn.Module, ids: Sequence[int], step: int) -> Iterator[tuple[mx.array, mx.array]]:
    """Yield (log-probabilities [t, vocabulary] float32, the next tokens [t]) for each pass."""
    ids, cache = list(ids), model.make_cache()
    for at in range(0, len(ids) - 1, step):
        target = mx.array(ids[at + 1 : at + 1 + step])
        logits = model(mx.array([ids[at : at + target.size]]), cache=cache)[0].astype(mx.float32)
        yield logits - mx.logsumexp(logits, -1, keepdims=True), target
        mx.clear_cache()


def _chosen(logp: mx.array, target: mx.array) -> np.ndarray:
    return np.array(mx.take_along_axis(logp, target[:, None], -1)[:, 0], dtype=np.float64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SRC", help="folder or hub id of a checkpoint, not quantised"
    )
    parser.add_argument("--text", required=True, metavar="FILE", help="text in UTF-8")
    parser.add_argument(
        "--recipes",
        type=lambda names: names.split(","),
        default=RECIPES,
        metavar="R,R",
        help="source, q8 ... q2, mxfp4, nvfp4; with +gates or +gates8 the gate path too, with "
        "=size in as many bytes by --target-bpw, with @FAMILY that family of weights alone",
    )
    add_output(parser)


def main(args: argparse.Namespace) -> int:
    loading.check_folder(args.source)
    return measure(BENCHMARK, rows(args.source, read_text(args.text), args.recipes), args)


if __name__ == "__main__":
    sys.exit(run(__doc__, add_arguments, main))
