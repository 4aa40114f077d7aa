"""Every path that runs on a CUDA GPU, on the same inputs in one run, with errors against float64.

    python -m mlx_kda.bench.cuda mlx RESULTS.json      ours and mlx-lm's, in MLX's CUDA build
    python -m mlx_kda.bench.cuda torch RESULTS.json    FLA and FlashKDA, in PyTorch

Two processes, since both frameworks keep the GPU's memory. Inputs are those of two heads, made by
`mlx_kda.oracle` from one seed, rounded to the candidate's dtype and repeated over the heads; the
truth is the float64 recurrence on exactly what the candidate was given. Times are medians of
chained calls, synchronised once a chain.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .. import oracle
from ..files import write_text

D = 128
HEADS = (32, 96)
TOKENS = (1, 512, 2048, 8192, 32768)
ROWS = ("random", "bounded", "repeated", "collinear")
LOWER_BOUND = -5.0
# The float64 loop is the slow part: errors are taken over this many tokens at most.
TRUTH_TOKENS = 2048
SAMPLES = 5
BUDGET = 0.25  # seconds a candidate and configuration


def inputs(row: str, T: int) -> oracle.Inputs:
    """Two heads of one kind of input; "bounded" has gates spread over all of (-5, 0)."""
    if row != "bounded":
        return oracle.make(row, T=T, H=2, Dk=D, Dv=D)
    x = oracle.make("random", T=T, H=2, Dk=D, Dv=D)
    u = np.random.default_rng(7).random(x.g.shape)
    return oracle.Inputs(x.q, x.k, x.v, (LOWER_BOUND * u).astype(np.float32), x.beta)


def measure(call: Callable[[], Any], wait: Callable[[Any], None]) -> tuple[float, float]:
    """(median, spread between quartiles over the median) of one call in milliseconds."""
    wait(call())
    wait(call())
    start = time.perf_counter()
    wait(call())
    calls = int(min(20, max(1, BUDGET / SAMPLES / (time.perf_counter() - start))))
    taken = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        taken.append((time.perf_counter() - start) / calls * 1e3)
    low, median, high = statistics.quantiles(taken, n=4, method="inclusive")
    return median, (high - low) / median


def compare(candidates: Callable, tokens: int, heads: int, row: str) -> Iterator[dict[str, Any]]:
    """Rows for one configuration. ``candidates(x, heads)`` yields
    (name, dtype, inputs it was given, call, wait, results -> numpy (o, state) of two heads)."""
    x = inputs(row, tokens)
    truths: dict[str, tuple] = {}
    for name, dtype, given, call, wait, read in candidates(x, heads):
        result: dict[str, Any] = {
            "candidate": name, "dtype": dtype, "row": row, "H": heads, "T": tokens
        }  # fmt: skip
        try:
            result["ms"], result["spread"] = measure(call, wait)
            if tokens <= TRUTH_TOKENS and heads == HEADS[0]:
                key = f"{dtype} {'raw' if name == 'FlashKDA' else ''}"
                if key not in truths:
                    truths[key] = oracle.recurrence(*given.arrays())
                o, S = read(call())
                result["error"] = oracle.error(o, truths[key][0])
                result["state_error"] = oracle.error(S, truths[key][1])
        except Exception as error:  # a peer that refuses is a result
            result["failed"] = " ".join(str(error).split())[:200]
        yield result


def run(kind: str) -> Iterator[dict[str, Any]]:
    """All configurations of one framework."""
    if kind == "mlx":
        from .cuda_mlx import candidates
    else:
        from .cuda_torch import candidates
    for heads in HEADS:
        for tokens in TOKENS:
            for row in ROWS if heads == HEADS[0] and tokens <= TRUTH_TOKENS else ROWS[:1]:
                yield from compare(candidates, tokens, heads, row)


def main(kind: str, out: str) -> None:
    """Run one framework's candidates; the document is whole after every row."""
    document: dict[str, Any] = {
        "title": f"Measured on CUDA: {'MLX' if kind == 'mlx' else 'PyTorch'}",
        "machine": _machine(kind),
        "note": "Errors are those of two heads on up to 2,048 tokens against float64.",
        "rows": [],
    }
    for row in run(kind):
        print(json.dumps(row), flush=True)
        document["rows"].append(row)
        write_text(Path(out), json.dumps(document, indent=1) + "\n")


def _machine(kind: str) -> str:
    date = time.strftime("%Y-%m-%d", time.gmtime())
    if kind == "mlx":
        import mlx.core as mx

        name = mx.device_info().get("device_name", "CUDA GPU")
        return f"{name}, mlx {mx.__version__}, {date}"
    import fla
    import torch

    name = torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, fla {fla.__version__}, {date}"


if __name__ == "__main__":
    main(*sys.argv[1:])
