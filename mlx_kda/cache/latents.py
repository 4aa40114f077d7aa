"""The cache of one MLA layer under a policy."""

from typing import Any

import mlx.core as mx

from ..errors import UserError
from .latent_storage import Blocks, Ring
from .policy import SHARED_BITS, Policy, group_size
from .quantized_rows import PLAIN, Causal, Packing, Part, Seen


class LatentCache:
    """What one MLA layer keeps of a text: latents and shared keys, as its policy says.

    ``absorb`` takes the tokens at hand and gives what they attend over. Under a window every query
    sees the first ``sinks`` tokens and the last ``window``, itself among them, so the chunks that a
    text comes in make no difference. Quantised rows are read back by every query, those of the
    chunk at hand too, for the same reason.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.store = Blocks() if policy.window is None else Ring(policy.window, policy.sinks)
        self.packing: tuple[Packing, Packing] | None = None  # known with the first rows

    @property
    def offset(self) -> int:
        """Tokens absorbed."""
        return self.store.length

    def absorb(self, latents: mx.array, shared: mx.array) -> Seen:
        """Keep latents [B, 1, T, rank] and shared keys [B, 1, T, rope]; what the queries see."""
        if self.packing is None:
            self.packing = packing(self.policy, latents.shape[-1], shared.shape[-1])
        rows = (*self.packing[0].pack(latents), *self.packing[1].pack(shared))
        first, T = self.offset, latents.shape[2]
        window, sinks = self.policy.window, self.policy.sinks
        if window is None:
            self.store.append(rows)
            parts, mask = self.store.parts(), None if T == 1 else Causal(first)
        elif T == 1:
            self.store.append(rows)
            parts, mask = self.store.parts(), self.store.mask()
        else:
            # Queries early in the chunk still see rows that its end overwrites.
            parts = [*self.store.parts(), rows]
            positions = mx.concatenate([self.store.positions(), mx.arange(first, first + T)])
            mask = Causal(first, positions, window, sinks)
            self.store.append(rows)
        return Seen([Part.of(arrays, self.packing) for arrays in parts], mask)

    def make_mask(self, T: int, **options: Any) -> None:
        """Nothing: ``absorb`` says who sees what."""

    @property
    def state(self) -> list[mx.array]:
        """Every array, to be evaluated with a step."""
        return self.store.arrays()

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, room for tokens to come included."""
        return sum(a.nbytes for a in self.store.arrays())

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def is_trimmable(self) -> bool:
        return False

    def clone(self) -> "LatentCache":
        other = LatentCache(self.policy)
        other.store, other.packing = self.store.clone(), self.packing
        return other


def packing(policy: Policy, rank: int, shared: int) -> tuple[Packing, Packing]:
    """How latents and shared keys of these widths are kept.

    Raises UserError where the latents' width cannot be quantised.
    """
    if policy.bits is None:
        return PLAIN, PLAIN
    group = group_size(rank)
    if group is None:
        raise UserError(
            f"cache policy {policy}: latents of {rank} numbers do not divide into groups of 32; "
            "use exact or a window"
        )
    keys = group_size(shared)
    return Packing(policy.bits, group), PLAIN if keys is None else Packing(SHARED_BITS, keys)
