"""`bench quality`: what a recipe costs, as perplexity on a text that the model never saw.

Each recipe (see `quality_recipes`) is converted into a temporary folder, loaded and judged.
"""

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from ..convert import convert
from ..errors import UserError
from ..models import load
from .quality_recipes import FAMILIES, Recipe

STEP = 512  # tokens a pass: logits of every one are in memory
# The recipes of a run that names none; the first is what the others are held against.
RECIPES = (
    "source", "q8", "q6", "q6=size", "q5", "q5=size", "q4", "q4=size", "q3", "q3=size", "q2",
    "q4+gates", "q4+gates8", "q3+gates", "q2+gates", "mxfp4", "mxfp4+gates",
    *(f"q{bits}@{family.replace(' ', '-')}" for bits in (4, 3) for family in FAMILIES),
)  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """What a model makes of each token of a text but the first, [T - 1] float64, in nats.

    nats: negative log-likelihood. divergence: ``sum_i p_i ln(p_i / q_i)`` of its distribution q
    from the first model's p, which says much more than the nats about how far a model has moved.
    """

    nats: np.ndarray
    divergence: np.ndarray


def read(path: Path) -> str:
    """A text file in UTF-8. Raises UserError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def run(source: str | Path, text: str, recipes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row a recipe, beside the first one.

    The first model's distributions are kept in a temporary file: 4 bytes for each token of the
    text and of the vocabulary. Raises UserError for an unknown recipe, and for a text too short.
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
    """Convert by a recipe into ``scratch`` and measure: a row, and what stands behind it.

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
        raise UserError("the text is too short to measure: give at least three tokens")
    tokens = measure(model, ids, scratch / "first.npy")
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
    """The mean of values, one a token, and its standard error, as two columns."""
    error = values.std(ddof=1) / math.sqrt(values.size)
    return {name: float(values.mean()), f"{name}_error": float(error)}


def widen(model: nn.Module) -> None:
    """Make every parameter that is a float float32; packed weights keep their values."""

    def cast(x: mx.array) -> mx.array:
        return x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x

    model.update(tree_map(cast, model.parameters()))


def text_nats(model: nn.Module, ids: Sequence[int], step: int = STEP) -> np.ndarray:
    """Negative log-likelihood in nats of every token but the first, [T - 1] float64."""
    return np.concatenate([-_chosen(logp, target) for logp, target in _passes(model, ids, step)])


def measure(model: nn.Module, ids: Sequence[int], first: Path) -> Tokens:
    """What a model makes of a text, beside the model whose distributions are in ``first``.

    Where there is no such file it is made of this model's, whose divergence is then 0.
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
    """(log-probabilities [t, vocabulary] float32, the tokens that came [t]), pass by pass."""
    ids, cache = list(ids), model.make_cache()
    for at in range(0, len(ids) - 1, step):
        target = mx.array(ids[at + 1 : at + 1 + step])
        logits = model(mx.array([ids[at : at + target.size]]), cache=cache)[0].astype(mx.float32)
        yield logits - mx.logsumexp(logits, -1, keepdims=True), target
        mx.clear_cache()


def _chosen(logp: mx.array, target: mx.array) -> np.ndarray:
    return np.array(mx.take_along_axis(logp, target[:, None], -1)[:, 0], dtype=np.float64)
