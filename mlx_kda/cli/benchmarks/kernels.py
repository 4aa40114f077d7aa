"""Benchmarks of the op and its kernels."""

import argparse

from .. import options
from .kind import MOST, Benchmark, Rows, columns, timed

ROWS = ("random", "repeated", "collinear", "deep", "mixed")  # of mlx_kda.ops.reference64


def _op_arguments(parser: argparse.ArgumentParser) -> None:
    timed(parser)
    parser.add_argument(
        "--tokens",
        type=options.numbers,
        default=[1, 64, 512, 2048],
        metavar="T,T",
        help="tokens (default: 1,64,512,2048)",
    )
    parser.add_argument(
        "--heads",
        type=options.numbers,
        default=[4, 32],
        metavar="H,H",
        help="heads (default: 4,32)",
    )
    parser.add_argument(
        "--dim",
        type=options.number(int, 1, MOST),
        default=128,
        metavar="D",
        help="Dk and Dv (default: 128)",
    )
    parser.add_argument(
        "--batch",
        type=options.number(int, 1, MOST),
        default=1,
        metavar="B",
        help="sequences side by side (default: 1)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="of the activations (default: float32)",
    )
    parser.add_argument(
        "--row", choices=ROWS, default="random", help="kind of inputs (default: random)"
    )
    parser.add_argument("--paths", default="auto", help="ours to run (default: auto)")


def _op_rows(args: argparse.Namespace) -> Rows:
    from ...attention import PATHS
    from ...bench import op
    from ...errors import UserError

    paths = args.paths.split(",")
    unknown = [path for path in paths if path not in PATHS]
    if unknown:
        raise UserError(f"--paths takes {', '.join(PATHS)}, got {unknown[0]!r}")
    return op.run(
        args.tokens,
        args.heads,
        dim=args.dim,
        batch=args.batch,
        dtype=args.dtype,
        row=args.row,
        paths=paths,
        samples=args.samples,
        budget=args.budget,
    )


def _launches_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--q-bits",
        type=int,
        choices=(0, 4, 8),
        default=4,
        metavar="N",
        help="bits of the weights, 0 for bfloat16 (default: 4)",
    )


def _launches_rows(args: argparse.Namespace) -> Rows:
    from ...bench import steps

    return steps.run(args.q_bits or None)


def _counters_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens",
        type=options.number(int, 1, MOST),
        default=64,
        metavar="T",
        help="tokens (default: 64)",
    )
    parser.add_argument(
        "--dim",
        type=int,
        choices=range(32, 257, 32),
        default=128,
        metavar="D",
        help="Dk and Dv (default: 128)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="bfloat16",
        help="of the activations (default: bfloat16)",
    )


def _counters_rows(args: argparse.Namespace) -> Rows:
    from ...bench import counters

    return counters.run(args.tokens, args.dim, args.dtype)


def _cuda_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=options.numbers, metavar="T,T", help="tokens (default: 1 to 32768)"
    )
    parser.add_argument(
        "--heads", type=options.numbers, metavar="H,H", help="heads, even numbers (default: 32,96)"
    )
    parser.add_argument(
        "--frameworks",
        default="mlx,torch",
        metavar="F,F",
        help="what to run, with commas (default: mlx,torch)",
    )


def _cuda_rows(args: argparse.Namespace) -> Rows:
    from ...bench import cuda
    from ...errors import UserError

    frameworks = args.frameworks.split(",")
    if not set(frameworks) <= set(cuda.FRAMEWORKS):
        raise UserError(f"--frameworks takes mlx, torch or both, got {args.frameworks!r}")
    heads = args.heads or cuda.HEADS
    if any(H % 2 for H in heads):
        raise UserError(f"--heads takes even numbers, got {','.join(map(str, heads))}")
    return cuda.run(args.tokens or cuda.TOKENS, heads, frameworks=frameworks)


KERNELS = (
    Benchmark(
        "op",
        "the op's paths against mlx-lm's, with the error beside the time",
        columns("H T candidate path ms us_per_token spread calls error", us_per_token="us a token"),
        _op_arguments,
        _op_rows,
        "Inputs are random unless `--row` names another kind; every call starts from the state "
        "that the one before left. Spread is that between the quartiles over the median; error is "
        "that of the output against float64.",
    ),
    Benchmark(
        "launches",
        "kernels that a decode step of Kimi Linear 48B asks of a GPU, counted",
        columns("candidate q_bits launches", q_bits="bits"),
        _launches_arguments,
        _launches_rows,
        "Counted from the graph as it is built with Metal, for the 48B's layers; nothing ran.",
    ),
    Benchmark(
        "counters",
        "what a kernel asks of a GPU, from the emulator, beside mlx-lm's and MLX's",
        columns(
            "candidate gate T mma fma special shuffles simd_sums barriers device_bytes "
            "unique_bytes threadgroup_bytes alu l1 overlapped serial",
            mma="MMA",
            fma="FMA",
            special="exp etc.",
            simd_sums="SIMD sums",
            device_bytes="device bytes",
            unique_bytes="unique bytes",
            threadgroup_bytes="threadgroup bytes",
            alu="ALU*",
            l1="L1*",
            overlapped="max*",
            serial="sum*",
        ),
        _counters_arguments,
        _counters_rows,
        "Per token and head, instructions per SIMD-group. *Core-cycles by a model of M1-class "
        "cores, not measured on a GPU.",
    ),
    Benchmark(
        "cuda",
        "every path on a CUDA GPU beside FLA and FlashKDA, with the errors beside the times",
        columns(
            "H T row dtype candidate ms spread error state_error failed",
            row="inputs",
            state_error="state error",
        ),
        _cuda_arguments,
        _cuda_rows,
        "Candidates took turns in one process; errors are those of two heads, outputs and "
        "state, against float64 on the inputs as rounded to the dtype. FLA's kernels were "
        "tuned over one warp count and pipeline depth.",
    ),
)
