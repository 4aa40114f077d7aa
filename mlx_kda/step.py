"""A model's steps over its cache: what it takes, the logits of the last token, and whether they are
numbers."""

import inspect
import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .errors import UserError

# Tokens of a prompt read at a time. A wish to stop waits for one step: on a CPU, where long steps
# are hardly faster, they are short.
GPU_STEP, CPU_STEP = 2048, 64


class NonFiniteLogits(UserError):
    """The model's logits hold NaN or infinity: the weights or the state are spoilt."""


def prefill_step() -> int:
    """Tokens of a prompt that are read at a time by default, on MLX's device now."""
    return CPU_STEP if mx.default_device().type == mx.DeviceType.cpu else GPU_STEP


def context_limit(model: nn.Module) -> int | None:
    """Longest context in tokens that the model's config allows, None where it names none."""
    config = getattr(model, "args", None) or getattr(model, "config", None)
    for name in ("model_max_length", "max_position_embeddings"):
        limit = getattr(config, name, None)
        if limit:
            return int(limit)
    return None


def checked_ids(model: nn.Module, ids: Sequence[int]) -> list[int]:
    """Ids as integers within the vocabulary: MLX would read past the embedding's end."""
    try:
        checked = [operator.index(i) for i in ids]
    except TypeError:
        raise UserError("token ids must be whole numbers") from None
    size = getattr(getattr(model, "args", None), "vocab_size", None)
    wrong = next((i for i in checked if i < 0 or (size is not None and i >= size)), None)
    if wrong is not None:
        raise UserError(f"token id {wrong} is not in the model's vocabulary of {size or 0:,}")
    return checked


def takes_last_only(model: nn.Module) -> bool:
    """Whether the model can compute the last row of logits alone."""
    return "last_only" in inspect.signature(type(model).__call__).parameters


def last_logits(model: nn.Module, tokens: mx.array, cache: list[Any], last_only: bool) -> mx.array:
    """Absorb tokens [T]; logits [1, vocabulary] of the last one, not evaluated yet."""
    if last_only:
        return model(tokens[None], cache=cache, last_only=True)[:, -1, :]
    if tokens.size > 1:
        # mlx-lm's own models give logits of every row: gigabytes for a long chunk.
        model(tokens[None, :-1], cache=cache)
    return model(tokens[None, -1:], cache=cache)[:, -1, :]


def cache_arrays(cache: list[Any]) -> list[Any]:
    """Every array of a cache, to be evaluated with a step."""
    # All of them, every step: a lazy counter left behind is a graph that never ends.
    return [entry.state for entry in cache if not entry.empty()]


def check_finite(finite: mx.array, position: int) -> None:
    """Raise NonFiniteLogits unless ``finite``, a bool of no dimensions, is true."""
    if not finite.item():
        raise NonFiniteLogits(
            f"the model's logits are not finite after {position:,} tokens: the weights are "
            "damaged or do not suit this dtype (convert again, with --dtype float32 to tell)"
        )
