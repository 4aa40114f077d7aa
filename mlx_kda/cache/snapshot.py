"""Points that a whole cache can come back to: what has to be held for it, and what has not.

A KDA state cannot be trimmed, so a mark holds it. Latents that are all kept need no copy: coming
back is to forget the later ones. A ring overwrites its past, so a mark holds the ring.
"""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache

from ..errors import UserError
from .latents import LatentCache

Mark = list[Any]


def mark(cache: list[Any], ahead: int | None = None) -> Mark:
    """Where the cache is now. Holds arrays by reference: valid while only ``restore`` goes back.

    With ``ahead`` the mark is good for going back over so many tokens, and lets a ring be written
    in place where those are few.

    MLX arrays are values, so what a later step computes never shows in it; what it holds stays
    allocated.
    """
    return [_mark(entry, ahead) for entry in cache]


def restore(cache: list[Any], point: Mark) -> None:
    """Bring the cache back to a mark of its own past. The mark can be used again."""
    for entry, held in zip(cache, point, strict=True):
        if isinstance(entry, LatentCache):
            entry.store.back(held)
        elif isinstance(entry, KVCache):
            entry.offset = held
        else:
            entry.cache = list(held)


def settle(point: Mark) -> Mark:
    """The mark with arrays of its own, evaluated, that keep no larger buffer alive."""
    arrays = {id(a): mx.contiguous(a) for a in _arrays(point)}
    settled = _mapped(point, lambda a: arrays[id(a)])
    mx.eval(list(arrays.values()))
    return settled


def nbytes(point: Mark) -> int:
    """Bytes that a mark holds."""
    return sum(a.nbytes for a in _arrays(point))


def clone(cache: list[Any]) -> list[Any]:
    """Another cache with the same content; either goes on without the other.

    Buffers are shared until one of the two writes into them.
    """
    return [_clone(entry) for entry in cache]


def can_mark(cache: list[Any]) -> bool:
    """Whether every entry is of a kind that these functions know."""
    return all(isinstance(entry, (LatentCache, KVCache, ArraysCache)) for entry in cache)


def check(cache: list[Any]) -> None:
    """Raise UserError for a cache that cannot be brought back."""
    if not can_mark(cache):
        kinds = {type(e).__name__ for e in cache} - {"LatentCache", "KVCache", "ArraysCache"}
        raise UserError(f"a cache of {', '.join(sorted(kinds))} cannot be rewound or copied")


def _mark(entry: Any, ahead: int | None) -> Any:
    if isinstance(entry, LatentCache):
        return entry.store.mark(ahead)
    return entry.offset if isinstance(entry, KVCache) else list(entry.cache)


def _clone(entry: Any) -> Any:
    if isinstance(entry, LatentCache):
        return entry.clone()
    other = type(entry).__new__(type(entry))
    other.__dict__.update(entry.__dict__)
    if isinstance(entry, KVCache):
        if entry.keys is not None:
            other.keys, other.values = mx.array(entry.keys), mx.array(entry.values)
    else:
        other.cache = list(entry.cache)
    return other


def _arrays(point: Any) -> list[mx.array]:
    return [a for _, a in tree_flatten(point) if isinstance(a, mx.array)]


def _mapped(point: Any, change: Any) -> Any:
    if isinstance(point, (list, tuple)):
        return type(point)(_mapped(item, change) for item in point)
    return change(point) if isinstance(point, mx.array) else point
