"""What KDA computes: gates, the textbook recurrence, the chunkwise form, and the dispatcher."""

from .chunked import CHUNKS, kda_chunk_ref
from .dispatch import PATHS, Choice, explain, kda
from .gates import bounded_gate, l2norm, softplus_gate
from .reference import kda_ref

__all__ = [
    "CHUNKS",
    "PATHS",
    "Choice",
    "bounded_gate",
    "explain",
    "kda",
    "kda_chunk_ref",
    "kda_ref",
    "l2norm",
    "softplus_gate",
]
