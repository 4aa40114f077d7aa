"""Timing that compares: candidates take turns, and the spread stands beside the median."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# A run whose spread is a larger share of the median is reported as noisy.
STEADY = 0.05


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of the samples, and the spread between their quartiles."""

    median: float
    spread: float  # (upper quartile - lower quartile) / median
    samples: int
    calls: int = 1  # chained calls in one sample

    @classmethod
    def of(cls, seconds: list[float], calls: int = 1) -> "Timing":
        """The timing of samples, each of them the seconds of one call."""
        return cls(statistics.median(seconds), spread(seconds), len(seconds), calls)

    def columns(self) -> dict[str, Any]:
        """Its columns in a row of results: ms, spread, steady, samples, calls."""
        return {
            "ms": self.median * 1e3,
            "spread": self.spread,
            "steady": self.spread <= STEADY,
            "samples": self.samples,
            "calls": self.calls,
        }


def interleave(
    candidates: dict[str, Callable[[int], None]],
    *,
    samples: int = 7,
    calls: int = 20,
    budget: float = 20.0,
    warm: bool = False,
) -> dict[str, Timing]:
    """Time every candidate in turns.

    Args:
        candidates: name -> function(calls) that makes that many chained calls and waits for them.
        samples: turns of each.
        calls: chained calls per sample; fewer where the slowest candidate would exceed its share
            of the budget, and the result says how many.
        budget: seconds that one candidate may take in all; three samples are always taken.
        warm: they have been called before.

    Returns:
        name -> Timing of one call.
    """
    once = {}
    for name, run in candidates.items():
        if not warm:
            run(1)  # compilation, allocation
        start = time.perf_counter()
        run(1)
        once[name] = time.perf_counter() - start
    slowest = max(once.values())
    calls = min(calls, max(1, int(budget / samples / slowest)))
    if calls == 1 and slowest * samples > budget:
        samples = max(3, int(budget / slowest))
    return take_turns(candidates, dict.fromkeys(candidates, calls), samples)


def take_turns(
    candidates: dict[str, Callable[[int], None]], calls: dict[str, int], samples: int
) -> dict[str, Timing]:
    """`interleave` with a number of calls for each candidate, all of which have been called."""
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(samples):
        for name, run in candidates.items():
            start = time.perf_counter()
            run(calls[name])
            taken[name].append((time.perf_counter() - start) / calls[name])
    return {name: Timing.of(seconds, calls[name]) for name, seconds in taken.items()}


def spread(samples: list[float]) -> float:
    """The distance between the quartiles, over the median."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / median
