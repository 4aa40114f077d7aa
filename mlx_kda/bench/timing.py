"""Timing that compares: candidates take turns, and the spread stands beside the median."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

# Beyond this share of the median, a run says that it is noisy.
STEADY = 0.05


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median over the samples, and the spread between their quartiles."""

    median: float
    spread: float  # (upper quartile - lower quartile) / median
    samples: int
    calls: int  # chained calls in one sample

    @property
    def steady(self) -> bool:
        return self.spread <= STEADY


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
        samples: turns each.
        calls: chained calls a sample; fewer where the slowest candidate would take longer than
            its share of the budget, and the result says how many.
        budget: seconds that one candidate may take in all, but for three samples.
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
    affordable = max(1, int(budget / samples / slowest))
    calls = min(calls, affordable)
    if calls == 1 and slowest * samples > budget:
        samples = max(3, int(budget / slowest))
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(samples):
        for name, run in candidates.items():
            start = time.perf_counter()
            run(calls)
            taken[name].append((time.perf_counter() - start) / calls)
    return {name: _timing(seconds, calls) for name, seconds in taken.items()}


def spread(seconds: list[float]) -> float:
    """Between the quartiles, over the median."""
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / median


def _timing(seconds: list[float], calls: int) -> Timing:
    return Timing(statistics.median(seconds), spread(seconds), len(seconds), calls)
