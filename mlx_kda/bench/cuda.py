"""`bench cuda`: every path that runs on a CUDA GPU, on the same inputs, in one process.

Candidates take turns within a configuration. Inputs are those of two heads, made by
`mlx_kda.ops.reference64` from one seed, rounded to the candidate's dtype and repeated over the
heads; the truth is the float64 recurrence on exactly what the candidate was given.
"""

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UserError
from ..ops import reference64 as oracle
from .timing import STEADY, spread

D = 128
HEADS = (32, 96)
TOKENS = (1, 512, 2048, 8192, 32768)
ROWS = ("random", "bounded", "repeated", "collinear")
LOWER_BOUND = -5.0
FRAMEWORKS = {"mlx": "mlx", "torch": "fla"}  # name -> the package that has to be there
# The float64 loop is slow, and one number of heads says it all: errors are taken up to here only.
TRUTH_TOKENS = 2048
SAMPLES = 7
SAMPLE_SECONDS = 0.03


@dataclass(frozen=True)
class Candidate:
    """One path on one configuration.

    given: what it computes on, after rounding to its dtype, as two heads in float32.
    call: starts the work; wait: returns when what a call returned is there.
    read: what a call returned -> (o, state) of the first two heads, in numpy.
    """

    name: str
    dtype: str
    given: oracle.Inputs
    call: Callable[[], Any]
    wait: Callable[[Any], None]
    read: Callable[[Any], tuple[np.ndarray, np.ndarray]]


def run(
    tokens: Sequence[int] = TOKENS,
    heads: Sequence[int] = HEADS,
    rows: Sequence[str] = ROWS,
    frameworks: Sequence[str] = tuple(FRAMEWORKS),
) -> Iterator[dict[str, Any]]:
    """A row of results for each candidate and configuration, as they come.

    Kinds of inputs beyond the first are run where their errors are taken: with the first number
    of heads, up to `TRUTH_TOKENS`. A candidate that fails gives a row that says how.

    Raises:
        UserError: a framework, or the GPU, is not there.
    """
    modules = [_module(name) for name in frameworks]
    for H in heads:
        for T in tokens:
            with_errors = heads[0] == H and T <= TRUTH_TOKENS
            for row in rows if with_errors else rows[:1]:
                x = inputs(row, T)
                candidates = [c for m in modules for c in m.candidates(x, H)]
                for result in _compare(candidates, with_errors):
                    yield {"row": row, "H": H, "T": T, **result}
                del candidates
                for module in modules:
                    module.release()


def inputs(row: str, T: int) -> oracle.Inputs:
    """Two heads of one kind of input; "bounded" has gates spread over all of (-5, 0)."""
    if row != "bounded":
        return oracle.make(row, T=T, H=2, Dk=D, Dv=D)
    x = oracle.make("random", T=T, H=2, Dk=D, Dv=D)
    u = np.random.default_rng(7).random(x.g.shape)
    return oracle.Inputs(x.q, x.k, x.v, (LOWER_BOUND * u).astype(np.float32), x.beta)


def _module(framework: str):
    package = FRAMEWORKS[framework]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{framework} candidates need the package {package}, which is missing")
    module = importlib.import_module(f".cuda_{framework}", __package__)
    module.check()
    return module


def _compare(candidates: list[Candidate], with_errors: bool) -> Iterator[dict[str, Any]]:
    """Time the candidates in turns, then their errors."""
    results: list[dict[str, Any]] = [{"candidate": c.name, "dtype": c.dtype} for c in candidates]
    calls = [_warm(c, result) for c, result in zip(candidates, results, strict=True)]
    taken: list[list[float]] = [[] for _ in candidates]
    for _ in range(SAMPLES):
        for i, candidate in enumerate(candidates):
            if calls[i]:
                start = time.perf_counter()
                for _ in range(calls[i]):
                    result = candidate.call()
                candidate.wait(result)
                taken[i].append((time.perf_counter() - start) / calls[i] * 1e3)
    truths: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for candidate, result, times in zip(candidates, results, taken, strict=True):
        if times:
            noise = spread(times)
            result |= {
                "ms": statistics.median(times),
                "spread": noise,
                "steady": noise <= STEADY,
            }
            if with_errors:
                key = id(candidate.given)
                if key not in truths:
                    truths[key] = oracle.recurrence(*candidate.given.arrays())
                o, S = candidate.read(candidate.call())
                result["error"] = oracle.error(o, truths[key][0])
                result["state_error"] = oracle.error(S, truths[key][1])
        yield result


def _warm(candidate: Candidate, result: dict[str, Any]) -> int:
    """Calls to chain in a sample; 0, and why in ``result``, for a candidate that cannot run."""
    try:
        candidate.wait(candidate.call())  # compiles
        candidate.wait(candidate.call())
        start = time.perf_counter()
        candidate.wait(candidate.call())
        once = time.perf_counter() - start
    except Exception as error:  # a peer that refuses is a result
        result["failed"] = " ".join(str(error).split())[:200]
        return 0
    return int(min(20, max(1, SAMPLE_SECONDS / once)))
