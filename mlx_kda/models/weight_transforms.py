"""Tensors that several families store in another layout: convolutions, gates, tied heads.

{q,k,v}_conv1d.weight [C,1,K] | [C,K]    ->  {q,k,v}_conv.conv.weight [C,K,1]
A_log [H] | [H,1] | [1,1,H,1] | padded   ->  A_log [1,1,H,1] float32
dt_bias [H*D] | [H,D]                    ->  dt_bias [H*D] float32
"""

from math import prod

import mlx.core as mx

from ..errors import CheckpointError
from ..weights.safetensors import Read, Spec
from ..weights.weight_mapping import MappingBuilder, Step


def convolution(build: MappingBuilder, name: str, channels: int, kernel: int, *hub: str) -> None:
    """A depthwise convolution's weight, ``name`` in MLX's layout or one of ``hub`` in PyTorch's."""
    source = build.first((name, *hub))
    if source is None:
        return
    if source == name:
        return build.tensor(name, (channels, kernel, 1))
    spec = build.floats(source, [(channels, 1, kernel), (channels, kernel)])
    shape = (channels, kernel, 1)
    build.add(
        Step((source,), {name: Spec(shape, spec.dtype)}, lambda r: {name: r(source).reshape(shape)})
    )


def decay(build: MappingBuilder, name: str, heads: int, *aliases: str) -> None:
    """A_log in any of its shapes; values beyond the last head are padding and must be zero."""
    if (source := build.first((name, *aliases))) is None:
        return
    shape = build.left[source].shape
    count = prod(shape)
    if count < heads or count != max(shape, default=1):
        raise CheckpointError(
            f"{source} has shape {list(shape)}, the config asks for {heads} heads"
        )
    build.floats(source, [shape])

    def run(read: Read) -> dict[str, mx.array]:
        values = read(source).reshape(-1).astype(mx.float32)
        # not (x == 0) also catches NaN
        if count > heads and not mx.all(values[heads:] == 0).item():
            raise CheckpointError(
                f"{source} holds {count} values for {heads} heads and those beyond are not zero"
            )
        return {name: values[:heads].reshape(1, 1, heads, 1)}

    build.add(Step((source,), {name: Spec((1, 1, heads, 1), mx.float32)}, run))


def float32(
    build: MappingBuilder,
    name: str,
    shape: tuple[int, ...],
    allowed: list[tuple[int, ...]],
    *aliases: str,
) -> None:
    """A parameter that stays float32 whatever the model's dtype; widening changes no value."""
    if (source := build.first((name, *aliases))) is None:
        return
    build.floats(source, allowed)
    build.add(
        Step(
            (source,),
            {name: Spec(shape, mx.float32)},
            lambda read: {name: read(source).astype(mx.float32).reshape(shape)},
        )
    )


def tied_head(build: MappingBuilder, shape: tuple[int, int], embedding: str) -> None:
    """A head beside tied embeddings is dropped, but only where it is the embedding."""
    head = "lm_head.weight"
    if not build.has(head):
        return
    build.floats(head, [shape])

    def run(read: Read) -> dict[str, mx.array]:
        if not mx.array_equal(read(head), read(embedding)).item():
            raise CheckpointError(
                f"the config ties the embeddings but {head} differs from {embedding}; "
                "set tie_word_embeddings to false in config.json"
            )
        return {}

    build.add(Step((head,), {}, run))
    build.mapping.dropped[head] = "tied to the embedding"
