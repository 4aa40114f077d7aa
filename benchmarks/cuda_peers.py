"""Every path of the op that runs on a CUDA GPU, beside FLA and FlashKDA, in one process.

    python benchmarks/cuda_peers.py --out results
    python benchmarks/cuda_peers.py --heads 32 --tokens 2048 --frameworks mlx

Candidates take turns within a configuration. Inputs are two heads made by
`mlx_kda.ops.reference64` from one seed, rounded to the candidate's dtype and repeated over the
heads; errors are against the float64 recurrence on exactly what the candidate was given.
"""

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import add_output, numbers, run

from mlx_kda.bench import results
from mlx_kda.bench.results import Benchmark, Row, columns
from mlx_kda.bench.timing import take_turns
from mlx_kda.cli.measure import measure
from mlx_kda.errors import UserError
from mlx_kda.ops import reference64

BENCHMARK = Benchmark(
    "cuda",
    "Every path on a CUDA GPU beside FLA and FlashKDA, with the errors beside the times",
    columns(
        "H T row dtype candidate ms spread error state_error failed",
        row="inputs",
        state_error="state error",
    ),
    "Candidates took turns in one process; errors are those of two heads, outputs and "
    "state, against float64 on the inputs as rounded to the dtype. FLA's kernels were "
    "tuned over one warp count and pipeline depth.",
)

D = 128
HEADS = (32, 96)
TOKENS = (1, 512, 2048, 8192, 32768)
ROWS = ("random", "bounded", "repeated", "collinear")
LOWER_BOUND = -5.0
FRAMEWORKS = {"mlx": "mlx", "torch": "fla"}  # name -> the package that has to be there
# The float64 loop is slow: errors are taken up to this length only.
TRUTH_TOKENS = 2048
SAMPLES = 7
SAMPLE_SECONDS = 0.03


@dataclass(frozen=True)
class Candidate:
    """One path on one configuration.

    Attributes:
        given: what it computes on, after rounding to its dtype: two heads in float32.
        call: starts the work.
        wait: returns when the result of a call is there.
        read: the result of a call -> (o, state) of the first two heads, in NumPy.
    """

    name: str
    dtype: str
    given: reference64.Inputs
    call: Callable[[], Any]
    wait: Callable[[Any], None]
    read: Callable[[Any], tuple[np.ndarray, np.ndarray]]

    def chain(self, calls: int) -> None:
        """Call it several times and wait for the last."""
        for _ in range(calls):
            result = self.call()
        self.wait(result)


def rows(
    tokens: Sequence[int] = TOKENS,
    heads: Sequence[int] = HEADS,
    kinds: Sequence[str] = ROWS,
    frameworks: Sequence[str] = tuple(FRAMEWORKS),
) -> Iterator[dict[str, Any]]:
    """Yield one row for each candidate and configuration.

    ``kinds`` of inputs beyond the first run only where errors are taken: with the first number of
    heads, up to `TRUTH_TOKENS`. A candidate that fails gets a row with its message.

    Raises:
        UserError: a framework, or the GPU, is not there.
    """
    modules = [_module(name) for name in frameworks]
    for H in heads:
        for T in tokens:
            with_errors = heads[0] == H and T <= TRUTH_TOKENS
            for row in kinds if with_errors else kinds[:1]:
                x = inputs(row, T)
                candidates = [c for m in modules for c in m.candidates(x, H)]
                for result in _compare(candidates, with_errors):
                    yield {"row": row, "H": H, "T": T, **result}
                del candidates
                for module in modules:
                    module.release()


def inputs(row: str, T: int) -> reference64.Inputs:
    """Two heads of one kind of input; "bounded" has gates spread over all of (-5, 0)."""
    if row != "bounded":
        return reference64.make(row, T=T, H=2, Dk=D, Dv=D)
    x = reference64.make("random", T=T, H=2, Dk=D, Dv=D)
    u = np.random.default_rng(7).random(x.g.shape)
    return reference64.Inputs(x.q, x.k, x.v, (LOWER_BOUND * u).astype(np.float32), x.beta)


def _module(framework: str):
    package = FRAMEWORKS[framework]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{framework} candidates need the package {package}, which is missing")
    module = importlib.import_module(f"cuda_{framework}")
    module.check()
    return module


def _compare(candidates: list[Candidate], with_errors: bool) -> Iterator[dict[str, Any]]:
    """Time the candidates in turns, then take their errors."""
    found: list[dict[str, Any]] = [{"candidate": c.name, "dtype": c.dtype} for c in candidates]
    keys = [f"{c.name} {c.dtype}" for c in candidates]
    warm = map(_warm, candidates, found)
    calls = {key: number for key, number in zip(keys, warm, strict=True) if number}
    chains = {k: c.chain for k, c in zip(keys, candidates, strict=True) if k in calls}
    timings = take_turns(chains, calls, SAMPLES)
    truths: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for key, candidate, result in zip(keys, candidates, found, strict=True):
        if key in timings:
            result |= timings[key].columns()
            if with_errors:
                given = id(candidate.given)
                if given not in truths:
                    truths[given] = reference64.recurrence(*candidate.given.arrays())
                o, S = candidate.read(candidate.call())
                result["error"] = reference64.error(o, truths[given][0])
                result["state_error"] = reference64.error(S, truths[given][1])
        yield result


def _warm(candidate: Candidate, result: dict[str, Any]) -> int:
    """Calls to chain in a sample; 0, and why in ``result``, for a candidate that cannot run."""
    try:
        candidate.chain(1)  # compiles
        candidate.chain(1)
        start = time.perf_counter()
        candidate.chain(1)
        once = time.perf_counter() - start
    except Exception as error:  # a peer that refuses is a result
        result["failed"] = " ".join(str(error).split())[:200]
        return 0
    return int(min(20, max(1, SAMPLE_SECONDS / once)))


_OURS = ("ours, kda_chunk exact", "ours, kda_chunk half", "ours, kda_recurrent", "ours, operations")
_PEERS = ("mlx-lm, loop", "mlx-lm, vector kernel", "FLA chunk_kda", "FlashKDA")


def tables(rows: list[Row]) -> str:
    """Sections of Markdown: times for each number of heads, ratios, errors, what failed."""
    row = rows[0]["row"] if rows else ""
    parts = []
    for H in _values(rows, "H"):
        timed = [r for r in rows if r["H"] == H and r["row"] == row and "ms" in r]
        parts.append(f"### {H} heads: milliseconds by length, {row} inputs\n\n{_times(timed)}")
    ratios = [r for r in rows if r["row"] == row and "ms" in r]
    parts.append(f"### Times as fast as a peer, {row} inputs, the same dtype\n\n{_ratios(ratios)}")
    known = [r for r in rows if "error" in r]
    if known:
        T = max(r["T"] for r in known)
        errors = _errors([r for r in known if r["T"] == T])
        parts.append(f"### Error of output / state by inputs, {T:,} tokens\n\n{errors}")
    parts += _remarks(rows)
    return "\n\n".join(parts)


def _times(rows: list[Row]) -> str:
    return _pivot(rows, "T", lambda r: ("" if results.steady(r) else "~") + results.show(r["ms"]))


def _errors(rows: list[Row]) -> str:
    return _pivot(rows, "row", lambda r: f"{r['error']:.1e} / {r['state_error']:.1e}")


def _pivot(rows: list[Row], across: str, cell) -> str:
    """A line for each candidate and dtype, a column for each value of ``across``."""
    columns = _values(rows, across)
    lines = []
    for name, dtype in dict.fromkeys((r["candidate"], r["dtype"]) for r in rows):
        mine = {r[across]: r for r in rows if (r["candidate"], r["dtype"]) == (name, dtype)}
        cells = {c: cell(mine[c]) for c in columns if c in mine}
        lines.append({"candidate": name, "dtype": dtype, **cells})
    headings = {c: f"{c:,}" if isinstance(c, int) else c for c in columns}
    return results.markdown(lines, {"candidate": "candidate", "dtype": "dtype", **headings})


def _ratios(rows: list[Row]) -> str:
    """Peer's time over ours, for every path of ours, peer and length that both were timed on."""
    timed = {(r["candidate"], r["dtype"], r["H"], r["T"]): r for r in rows}
    columns = {(r["H"], r["T"]): f"H {r['H']}, T {r['T']:,}" for r in rows}
    lines = []
    for dtype in _values(rows, "dtype"):
        for ours in _OURS:
            for peer in _PEERS:
                line: Row = {"ours": ours, "peer": peer, "dtype": dtype}
                for H, T in columns:
                    pair = timed.get((ours, dtype, H, T)), timed.get((peer, dtype, H, T))
                    if None not in pair:
                        ratio = results.show(pair[1]["ms"] / pair[0]["ms"])
                        line[(H, T)] = ("" if all(map(results.steady, pair)) else "~") + ratio
                if len(line) > 3:
                    lines.append(line)
    return results.markdown(lines, {"ours": "ours", "peer": "peer", "dtype": "dtype", **columns})


def _remarks(rows: list[Row]) -> list[str]:
    parts = []
    failed = dict.fromkeys((r["candidate"], r["failed"]) for r in rows if "failed" in r)
    parts += [f"{name} could not run: {why}" for name, why in failed]
    if noise := results.noise(rows):
        parts.append(f"{noise}: marked ~, and ratios of them too.")
    return parts


def _values(rows: Iterable[Row], key: str) -> list:
    return list(dict.fromkeys(r[key] for r in rows))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    numbers(parser, "--tokens", list(TOKENS), "tokens")
    numbers(parser, "--heads", list(HEADS), "heads, even numbers")
    parser.add_argument(
        "--frameworks",
        default=",".join(FRAMEWORKS),
        metavar="F,F",
        help="what to run, separated by commas (default: mlx,torch)",
    )
    add_output(parser)


def main(args: argparse.Namespace) -> int:
    frameworks = args.frameworks.split(",")
    if not set(frameworks) <= set(FRAMEWORKS):
        raise UserError(f"--frameworks takes mlx, torch or both, got {args.frameworks!r}")
    if any(H % 2 for H in args.heads):
        raise UserError(f"--heads takes even numbers, got {','.join(map(str, args.heads))}")
    return measure(BENCHMARK, rows(args.tokens, args.heads, frameworks=frameworks), args)


if __name__ == "__main__":
    sys.exit(run(__doc__, add_arguments, main))
