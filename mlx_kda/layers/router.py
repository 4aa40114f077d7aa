"""Which experts a token goes to, and with what weight: float32 throughout."""

from functools import partial

import mlx.core as mx


@partial(mx.compile, shapeless=True)
def _sigmoid_scores(logits: mx.array, bias: mx.array) -> tuple[mx.array, mx.array]:
    scores = mx.sigmoid(logits)
    return scores, scores + bias


@partial(mx.compile, shapeless=True)
def _share(weights: mx.array, total: mx.array, scale: float) -> mx.array:
    return weights / (total + 1e-20) * scale


def route(
    logits: mx.array,
    bias: mx.array,
    *,
    top_k: int,
    groups: int = 1,
    kept_groups: int = 1,
    activation: str = "sigmoid",
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[mx.array, mx.array]:
    """Choose by ``score + bias``, weigh by ``score``.

    With groups, only the ``kept_groups`` whose two best biased scores sum highest take part. The
    others are set to -inf: a biased score may be negative, so 0 would not keep them out.

    Args:
        logits: float32 [..., experts].
        bias: float32 [experts]; it moves the choice, never the weight.

    Returns:
        (experts chosen [..., top_k], weights float32 [..., top_k]), in no particular order.
    """
    if activation == "sigmoid":
        scores, choice = _sigmoid_scores(logits, bias)
    elif activation == "softmax":
        scores = mx.softmax(logits, axis=-1, precise=True)
        choice = scores + bias
    else:
        raise ValueError(f"router activation must be 'sigmoid' or 'softmax', got {activation!r}")
    dropped = groups - kept_groups
    if dropped:
        choice = mx.unflatten(choice, -1, (groups, -1))
        best = mx.topk(choice, min(2, choice.shape[-1]), axis=-1).sum(axis=-1, keepdims=True)
        worst = mx.argpartition(best, kth=dropped - 1, axis=-2)[..., :dropped, :]
        choice = mx.put_along_axis(choice, worst, mx.array(-mx.inf), axis=-2)
        choice = mx.flatten(choice, -2, -1)
    chosen = mx.argpartition(-choice, kth=top_k - 1, axis=-1)[..., :top_k]
    chosen = mx.stop_gradient(chosen)
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    if renormalize:
        return chosen, _share(weights, weights.sum(axis=-1, keepdims=True), scale)
    return chosen, weights * scale
