"""What KDA computes: gates, the textbook recurrence, the chunkwise form, and the dispatcher."""

from .gates import bounded_gate, l2norm, softplus_gate
from .reference import kda_ref

__all__ = ["bounded_gate", "kda_ref", "l2norm", "softplus_gate"]
