"""What our kernels, mlx-lm's and MLX's ask of a GPU, counted by the emulator; nothing is timed.

    python benchmarks/counters.py
    python benchmarks/counters.py --json > counters.json

Counts are exact, per token and head, with instructions counted once per SIMD-group. Core-cycles
follow a model of M1-class cores, not a measurement:

    alu          instructions weighted by published cycle counts, on the four schedulers of a core
    l1           device bytes requested, at 64 bytes per cycle
    threadgroup  threadgroup bytes requested, at 64 bytes per cycle
    lower        the largest of the three: all of it overlaps
    upper        their sum: nothing overlaps

--json prints only a JSON list, one object per kernel. Each has "kernel", "mode", "Dk", "Dv",
"device_bytes" (requested), "unique_bytes" (of the buffers touched), "alu", "l1", "threadgroup",
"lower" and "upper", beside the counts. kda_chunk is the sum of its launches, which follow it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from common import add_output, choice, count, run
from peer_kernels import mlx_call, mlx_gated_delta, mlx_lm_call, mlx_lm_gated_delta

from mlx_kda.bench.results import Benchmark, Row, columns, markdown
from mlx_kda.cli.measure import DTYPES, measure
from mlx_kda.kernels.arguments import LayerParameters, LayerState, Projections
from mlx_kda.kernels.chunk import kda_chunk
from mlx_kda.kernels.decode import kda_decode
from mlx_kda.kernels.recurrent import kda_recurrent
from mlx_kda.ops.inputs import CheckedInputs
from mlx_kda.runners import metal_kernel
from mlx_kda.runners.counters import Counts, counting
from mlx_kda.runners.counters import count as count_launch

RUNNER = "emulator-count"
COUNTS = (
    "mma fma add mul special convert shuffles simd_sums simd_barriers barriers device_bytes "
    "device_lane_bytes threadgroup_bytes"
)
BENCHMARK = Benchmark(
    "counters",
    "What a kernel asks of a GPU, from the emulator, beside mlx-lm's and MLX's",
    columns(
        "kernel mode gate T mma fma special shuffles simd_sums barriers device_bytes "
        "unique_bytes threadgroup_bytes alu l1 threadgroup lower upper",
        mma="MMA",
        fma="FMA",
        special="exp etc.",
        simd_sums="SIMD sums",
        device_bytes="device bytes",
        unique_bytes="unique bytes",
        threadgroup_bytes="threadgroup bytes",
        alu="ALU*",
        l1="L1*",
        threadgroup="threadgroup*",
        lower="lower*",
        upper="upper*",
    ),
    "Per token and head, instructions per SIMD-group. *Core-cycles by a model of M1-class cores, "
    "not measured on a GPU: lower is the largest of ALU, L1 and threadgroup, upper their sum.",
)
# GPU cores and clock in GHz, from public specifications and measurements.
CHIPS = {"M1 Max": (32, 1.3), "M3 Ultra": (80, 1.4), "M4 Max": (40, 1.58)}
PREDICTED = ("kda_chunk", "mlx-lm gated_delta_step_vec")

Launches = list[tuple[str, Counts]]


def rows(tokens: int = 64, dim: int = 128, dtype: str = "bfloat16") -> Iterator[Row]:
    """Yield one row for each kernel, and for each launch of those that have several.

    Prefill kernels run ``tokens`` tokens of one head, Dk = Dv = ``dim``; the decode step one token.
    The state's traffic is spread over the tokens.
    """
    inputs = _Inputs(tokens, dim, getattr(mx, dtype))
    for kernel, mode, gate, launches in (*_ours(inputs), *_peers(inputs)):
        T = 1 if kernel == "kda_decode" else tokens
        about = {"mode": mode, "gate": gate, "T": T, "Dk": dim, "Dv": dim}
        total = sum((counts for _, counts in launches), Counts())
        yield {"kernel": kernel, **about, **_columns(total.per(T))}
        if len(launches) > 1:
            for launch, counts in launches:
                yield {"kernel": launch, **about, **_columns(counts.per(T))}


def _columns(counts: Counts) -> dict[str, float]:
    cycles = {
        "alu": float(counts.alu_cycles),
        "l1": float(counts.l1_cycles),
        "threadgroup": float(counts.threadgroup_cycles),
    }
    return {
        **{key: float(getattr(counts, key)) for key in COUNTS.split()},
        "unique_bytes": float(counts.unique_read + counts.unique_written),
        "threadgroup_memory": counts.threadgroup_memory,
        **cycles,
        "lower": max(cycles.values()),
        "upper": sum(cycles.values()),
    }


class _Inputs:
    """One head's arrays; their values do not change a count."""

    def __init__(self, T: int, D: int, dtype: mx.Dtype):
        rng = np.random.default_rng(0)
        k = rng.standard_normal((1, T, 1, D))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        self.D, self.dtype = D, dtype
        self.k = self.q = mx.array(k.astype(np.float32)).astype(dtype)
        self.v = mx.array(rng.standard_normal((1, T, 1, D)).astype(np.float32)).astype(dtype)
        self.g = mx.array(-rng.uniform(0.01, 1, (1, T, 1, D)).astype(np.float32))
        self.beta = mx.full((1, T, 1), 0.5).astype(dtype)
        self.state = mx.zeros((1, 1, D, D))

    def peer(self, scalar: bool) -> tuple[mx.array, ...]:
        """Arguments of a peer's kernel, with one gate per head or per channel."""
        decay = mx.exp(self.g[..., 0] if scalar else self.g)
        return self.q, self.k, self.v, decay, self.beta, self.state


def _ours(x: _Inputs) -> Iterator[tuple[str, str, str, Launches]]:
    """(kernel, mode, gate, launches) of each of our kernels."""
    given = CheckedInputs(x.q, x.k, x.v, x.g, x.beta.astype(mx.float32), state=x.state)
    for mode in ("exact",) if x.dtype == mx.float32 else ("exact", "half"):
        call = partial(kda_chunk, given, mode=mode, runner=RUNNER)
        yield "kda_chunk", mode, "channel", _launches(call)
    call = partial(kda_recurrent, given, runner=RUNNER)
    yield "kda_recurrent", "exact", "channel", _launches(call)
    yield "kda_decode", "exact", "channel", _launches(partial(_decode, x))


def _decode(x: _Inputs) -> Any:
    window = mx.zeros((1, 3, x.D), x.dtype)
    flat = x.q[:, :1, 0]
    p = Projections(flat, flat, flat, x.g[:, :1], x.beta[:, :1], x.v[:, :1])
    conv_weight, weight = mx.ones((x.D, 4), x.dtype), mx.ones((x.D,), x.dtype)
    w = LayerParameters(1, 1, x.D, x.D, (conv_weight,) * 3, None, weight, 1e-5)
    return kda_decode(p, w, LayerState(window, window, window, x.state), runner=RUNNER)


def _launches(call: Callable[[], Any]) -> Launches:
    with counting() as log:
        mx.eval(call())
    return log


def _peers(x: _Inputs) -> Iterator[tuple[str, str, str, Launches]]:
    """(kernel, mode, gate, launches) of each peer's kernel that takes these sizes."""
    theirs = mlx_lm_gated_delta(metal_kernel)
    packed = [("gated_delta_step_packed_btree", "head", 8)] if x.D == 128 else []
    for name, gate, per_group in (
        ("gated_delta_step_vec", "channel", 1),
        ("gated_delta_step", "head", 1),
        *packed,
    ):
        call = mlx_lm_call(*x.peer(gate == "head"), rows=per_group)
        yield f"mlx-lm {name}", "", gate, [(name, count_launch(theirs[name], **call))]
    q, k, v, g, beta, state = x.peer(scalar=True)
    for name in ("gated_delta_seq", "gated_delta_fused_chunk"):
        call = mlx_call(name, q, k, v, g.astype(x.dtype), beta, state)
        counts = count_launch(mlx_gated_delta(metal_kernel, name), **call)
        yield f"MLX {name}", "", "head", [(name, counts)]


def predictions(found: list[Row]) -> str:
    """Prefill of the recurrence on Apple chips by the model, as a section of a page."""
    lines = []
    for chip, (cores, clock) in CHIPS.items():
        scale = 32 / (cores * clock * 1e3)
        lines += [
            {
                "chip": chip,
                "kernel": f"{row['kernel']} {row['mode']}".strip(),
                "low": row["lower"] * scale,
                "high": row["upper"] * scale,
            }
            for row in found
            if row["kernel"] in PREDICTED
        ]
    if not lines:
        return ""
    table = markdown(
        lines, columns("chip kernel low high", low="us per token, at least", high="at most")
    )
    return f"""## Predicted, not measured: the recurrence of one KDA layer on Apple chips

{table}

For 32 heads of 128 x 128, from the counters above: core-cycles of ALU, L1 and threadgroup memory
fully overlapped (at least) or not at all (at most), over cores x clock. A model of M1-class cores;
it knows nothing of memory bandwidth beyond the cores, of launches, or of how well a compiler
does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count(parser, "--tokens", 64, "tokens")
    parser.add_argument(
        "--dim",
        type=int,
        choices=range(32, 257, 32),
        default=128,
        metavar="D",
        help="Dk and Dv (default: 128)",
    )
    choice(parser, "--dtype", DTYPES, "bfloat16", "of the activations")
    parser.add_argument("--json", action="store_true", help="print a JSON list and nothing else")
    add_output(parser)


def main(args: argparse.Namespace) -> int:
    found = rows(args.tokens, args.dim, args.dtype)
    if args.json:
        print(json.dumps(list(found), indent=1))
        return 0
    return measure(BENCHMARK, found, args)


if __name__ == "__main__":
    sys.exit(run(__doc__, add_arguments, main))
