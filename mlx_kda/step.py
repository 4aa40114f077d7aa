"""What a step of any model takes and gives: tokens read at once, valid ids, finite logits."""

import operator
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from .errors import UserError

# Tokens of a prompt read at once. Stopping waits for one step, so steps are short on a CPU, where
# long ones are hardly faster.
GPU_STEP, CPU_STEP = 2048, 64


class NonFiniteLogits(UserError):
    """The model's logits hold NaN or infinity: the weights or the state are damaged."""


def prefill_step() -> int:
    """Tokens of a prompt that are read at once by default, on MLX's current device."""
    return CPU_STEP if mx.default_device().type == mx.DeviceType.cpu else GPU_STEP


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


def check_finite(finite: mx.array, position: int) -> None:
    """Raise NonFiniteLogits unless ``finite``, a bool of no dimensions, is true."""
    if not finite.item():
        raise NonFiniteLogits(
            f"the model's logits are not finite after {position:,} tokens: the weights are "
            "damaged or do not suit this dtype (to find out, convert again with --dtype float32)"
        )
