"""Float32 weights laid out in memory as the CPU's BLAS reads them fastest.

MLX's CPU build for Linux multiplies float32 matrices by the reference BLAS. There ``x @ W.T`` with
W [N, K] row by row in memory is a loop of dot products; with W^T row by row it is a loop of vector
updates, which the compiler vectorised. Both have the same W, shape and results but for rounding.
Measured with mlx 0.32.4 on 2 cores of an AMD EPYC, GFLOP/s as stored / as laid out here::

    x [1, 256]      W [4352, 256]       2.7 / 5.4     x [256, 64]    W [256, 64]     3.1 / 5.9
    x [8, 256]      W [256, 256]        2.7 / 5.9     x [1024, 256]  W [256, 256]    2.8 / 6.2
    gather_mm, 4 of 16 experts [64, 256]:  1 token 1.5 / 2.4, 8: 2.5 / 5.0, 1024: 2.7 / 6.0

float16 and bfloat16 products go through another loop, the same for both layouts (4 to 6), so those
weights stay as they are, but for experts, which MLX's CPU build multiplies in float32 only. A GPU
takes either layout as it is, and so does Apple's BLAS: nothing changes there. To repeat::

    python -m timeit -s "import mlx.core as mx; x = mx.random.normal((256, 256))" \\
        -s "w = mx.random.normal((640, 256)); t = mx.contiguous(w.T).T; mx.eval(x, w, t)" \\
        "mx.eval(x @ w.T)"                # and once more with t in the place of w
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

_on = True


@contextlib.contextmanager
def as_stored() -> Iterator[None]:
    """Leave weights as they are stored within this context: to measure what the layout gains."""
    global _on
    _on = False
    try:
        yield
    finally:
        _on = True


def applies() -> bool:
    """Whether products run on MLX's Linux CPU build, where the layout matters."""
    return _on and mx.default_device() == mx.cpu and sys.platform != "darwin"


def gains(layer: nn.Module) -> bool:
    """Whether laying out the weight of a linear layer or of experts pays here."""
    if not applies() or type(layer) not in (nn.Linear, SwitchLinear, MultiLinear):
        return False
    dtype = layer.weight.dtype
    experts = isinstance(layer, SwitchLinear)
    return dtype == mx.float32 or (experts and dtype in (mx.float16, mx.bfloat16))


def laid_out(weight: mx.array) -> mx.array:
    """The same array with its last two axes swapped in memory."""
    return mx.contiguous(weight.swapaxes(-1, -2)).swapaxes(-1, -2)


def as_right_factor(keys: mx.array) -> mx.array:
    """``keys`` [..., S, D] for a product ``x @ keys^T``: laid out where that is faster."""
    return laid_out(keys) if applies() and keys.dtype == mx.float32 else keys


def stacked(weights: Sequence[mx.array]) -> mx.array:
    """Matrices [..., N_i, K] concatenated to [..., N, K], laid out."""
    return mx.concatenate([w.swapaxes(-1, -2) for w in weights], axis=-1).swapaxes(-1, -2)


def lay_out(model: nn.Module) -> None:
    """Lay out every weight of a language model that gains from it; elsewhere, do nothing.

    Weights are laid out one at a time, so that at most one is in memory twice. Names, shapes and
    values stay, and an array assigned to a weight later is used as it is. ``model`` is one of this
    package or of mlx-lm.
    """
    if not applies():
        return
    for path, layer in model.named_modules():
        # Keys are expanded by embed_q as it is stored, x @ W: laid out it would be the slow form.
        if gains(layer) and not path.endswith("embed_q"):
            _replace(layer)
    if model.args.tie_word_embeddings:  # the head, whose product outweighs a few slower lookups
        embedding = model.model.embed_tokens
        if type(embedding) is nn.Embedding and embedding.weight.dtype == mx.float32:
            _replace(embedding)


def _replace(layer: nn.Module) -> None:
    weight = laid_out(layer.weight)
    mx.eval(weight)
    layer.weight = weight
