"""Merge rules of a byte-pair vocabulary, derived from ranks.

tiktoken and sentencepiece keep no merges: they join, again and again, the neighbours whose union
has the best rank. The `tokenizers` library wants the pairs. For each token one pair is enough: the
two parts left when the same joining, applied to the token alone, stops short of the token itself.
Inside any text the token's span evolves in just that way, or the token is not formed there at all.
"""

from collections.abc import Mapping
from typing import TypeVar

Units = TypeVar("Units", bytes, str)


def derive_merges(ranks: Mapping[Units, int]) -> list[tuple[Units, Units]]:
    """The pairs that form tokens, best rank first.

    `ranks` maps a token, as bytes or as text, to its rank; lower ranks are joined first. Tokens
    that no joining can reach get no pair (they only match a whole word).
    """
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = _join(token, ranks)
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _join(token: Units, ranks: Mapping[Units, int]) -> list[Units]:
    """Join the units of a token by rank, never into the whole token."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        unions = (ranks.get(parts[i] + parts[i + 1]) for i in range(len(parts) - 1))
        found = [(rank, i) for i, rank in enumerate(unions) if rank is not None]
        if not found:
            break
        i = min(found)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts
