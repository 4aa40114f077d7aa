"""What KDA computes: gates, the textbook recurrence, the chunkwise form, and the dispatcher."""

from .chunked import CHUNKS, kda_chunk_ref
from .dispatch import PATHS, Choice, explain, kda
from .gates import bounded_gate, l2norm, softplus_gate
from .reference import kda_ref
from .stepwise import kda_step

__all__ = [
    "CHUNKS",
    "PATHS",
    "Choice",
    "bounded_gate",
    "explain",
    "kda",
    "kda_chunk_ref",
    "kda_ref",
    "kda_step",
    "l2norm",
    "softplus_gate",
]
