"""What KDA computes: gates, the textbook recurrence, the chunkwise form."""

from .chunked import CHUNKS, kda_chunk_ref
from .gates import bounded_gate, l2norm, softplus_gate
from .reference import kda_ref

__all__ = [
    "CHUNKS",
    "bounded_gate",
    "kda_chunk_ref",
    "kda_ref",
    "l2norm",
    "softplus_gate",
]
