"""The kinds of `mlx-kda bench`: their options, columns, and how their rows are made.

Nothing heavy is imported until rows are asked for.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_kda.cli import checks, parsing

Rows = Iterator[dict[str, Any]]

LONGEST, MOST = 86_400, 10**9  # seconds, and anything that is counted


@dataclass(frozen=True)
class Benchmark:
    """One kind: its name, what it is in a line, its columns, options and rows."""

    name: str
    what: str
    columns: dict[str, str]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    rows: Callable[[argparse.Namespace], Rows]
    note: str = ""


def _timed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--samples",
        type=parsing.number(int, 3, MOST),
        default=7,
        metavar="N",
        help="samples of a candidate and size (default: 7)",
    )
    parser.add_argument(
        "--budget",
        type=parsing.number(float, 0.1, LONGEST),
        default=20.0,
        metavar="S",
        help="seconds a candidate and size may take (default: 20)",
    )


def _op_arguments(parser: argparse.ArgumentParser) -> None:
    _timed(parser)
    parser.add_argument(
        "--tokens",
        type=parsing.numbers,
        default=[1, 64, 512, 2048],
        metavar="T,T",
        help="tokens (default: 1,64,512,2048)",
    )
    parser.add_argument(
        "--heads",
        type=parsing.numbers,
        default=[4, 32],
        metavar="H,H",
        help="heads (default: 4,32)",
    )
    parser.add_argument(
        "--dim",
        type=parsing.number(int, 1, MOST),
        default=128,
        metavar="D",
        help="Dk and Dv (default: 128)",
    )
    parser.add_argument(
        "--batch",
        type=parsing.number(int, 1, MOST),
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
    parser.add_argument("--row", default="random", help="kind of inputs (default: random)")
    parser.add_argument("--paths", default="auto", help="ours to run (default: auto)")


def _op_rows(args: argparse.Namespace) -> Rows:
    from mlx_kda import oracle
    from mlx_kda.bench import op
    from mlx_kda.errors import UserError
    from mlx_kda.ops import PATHS

    if args.row not in oracle.ROWS:
        raise UserError(f"--row is one of {', '.join(oracle.ROWS)}, got {args.row!r}")
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


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    _timed(parser)
    parser.add_argument("model", metavar="MODEL", help="folder of a checkpoint")
    parser.add_argument(
        "--contexts",
        type=parsing.numbers,
        default=[1024, 8192],
        metavar="N,N",
        help="tokens in the context (default: 1024,8192)",
    )


def _model_rows(args: argparse.Namespace) -> Rows:
    checks.checkpoint(args.model)
    from mlx_kda.bench import model

    return model.run(Path(args.model), args.contexts, samples=args.samples, budget=args.budget)


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
    from mlx_kda.bench import steps

    return steps.run(args.q_bits or None)


def _counters_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens",
        type=parsing.number(int, 1, MOST),
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
    from mlx_kda.bench import counters

    return counters.run(args.tokens, args.dim, args.dtype)


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="folder of the checkpoint")
    parser.add_argument(
        "--q-bits", type=int, choices=(2, 3, 4, 5, 6, 8), metavar="N", help="quantise to N bits"
    )
    parser.add_argument(
        "--samples",
        type=parsing.number(int, 1, MOST),
        default=3,
        metavar="N",
        help="conversions by each (default: 3)",
    )


def _convert_rows(args: argparse.Namespace) -> Rows:
    checks.folder(args.source)
    from mlx_kda.bench import conversion

    return conversion.run(Path(args.source), q_bits=args.q_bits, samples=args.samples)


def _endurance_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=parsing.number(int, 0, MOST),
        default=30_000,
        metavar="N",
        help="tokens to decode (default: 30000)",
    )
    parser.add_argument(
        "--prompts",
        type=parsing.numbers,
        default=[20_000, 100_000],
        metavar="N,N",
        help="tokens of each prompt (default: 20000,100000)",
    )
    parser.add_argument(
        "--policy",
        type=parsing.policy,
        default="window:1024+16",
        metavar="P",
        help="a cache policy (default: window:1024+16)",
    )


def _endurance_rows(args: argparse.Namespace) -> Rows:
    from mlx_kda.bench import endurance

    return itertools.chain(
        endurance.decode(args.steps, policy=str(args.policy)),
        endurance.prompts(args.prompts, policy=str(args.policy)),
    )


def _quality_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SRC", help="folder or hub id of a checkpoint, not quantised"
    )
    parser.add_argument("--text", required=True, metavar="FILE", help="text in UTF-8")
    parser.add_argument(
        "--recipes",
        metavar="R,R",
        help="source, q8 ... q2, mxfp4, nvfp4; with +gates or +gates8 the gate path too, with "
        "=size in as many bytes by --target-bpw, with @FAMILY that family of weights alone",
    )


def _quality_rows(args: argparse.Namespace) -> Rows:
    checks.folder(args.source)
    from mlx_kda.bench import quality

    recipes = args.recipes.split(",") if args.recipes else quality.RECIPES
    return quality.run(args.source, quality.read(Path(args.text)), recipes)


def _cuda_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=parsing.numbers, metavar="T,T", help="tokens (default: 1 to 32768)"
    )
    parser.add_argument(
        "--heads", type=parsing.numbers, metavar="H,H", help="heads, even numbers (default: 32,96)"
    )
    parser.add_argument(
        "--frameworks", default="mlx,torch", metavar="F,F", help="default: mlx,torch"
    )


def _cuda_rows(args: argparse.Namespace) -> Rows:
    from mlx_kda.bench import cuda
    from mlx_kda.errors import UserError

    frameworks = args.frameworks.split(",")
    if not set(frameworks) <= set(cuda.FRAMEWORKS):
        raise UserError(f"--frameworks takes mlx, torch or both, got {args.frameworks!r}")
    heads = args.heads or cuda.HEADS
    if any(H % 2 for H in heads):
        raise UserError(f"--heads takes even numbers, got {','.join(map(str, heads))}")
    return cuda.run(args.tokens or cuda.TOKENS, heads, frameworks=frameworks)


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="folder of a checkpoint, or else --shape"
    )
    parser.add_argument("--shape", choices=("48b",), help="a random model of this shape instead")
    parser.add_argument(
        "--layers", type=parsing.number(int, 1, MOST), metavar="N", help="its first N"
    )
    parser.add_argument(
        "--vocab", type=parsing.number(int, 1, MOST), metavar="N", help="its vocabulary"
    )
    parser.add_argument(
        "--q-bits",
        type=int,
        choices=(0, 4, 8),
        default=0,
        metavar="N",
        help="bits of its weights, 0 for not quantised (default: 0)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="bfloat16",
        help="of the activations (default: bfloat16)",
    )
    parser.add_argument("--runner", default="auto", help="of the KDA layers (default: auto)")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: MLX's own choice")
    parser.add_argument(
        "--tokens",
        type=parsing.number(int, 1, MOST),
        default=512,
        metavar="T",
        help="tokens of the prefill (default: 512)",
    )
    _timed(parser)


def _profile_rows(args: argparse.Namespace) -> Rows:
    if args.model is not None and args.shape is None:
        checks.checkpoint(args.model)
    from mlx_kda.bench import profile

    options = {name: getattr(args, name) for name in _PROFILE_OPTIONS}
    return profile.of(args.model, **options, q_bits=args.q_bits or None)


_PROFILE_OPTIONS = (
    *("shape", "layers", "vocab", "dtype", "runner", "device"),
    *("tokens", "samples", "budget"),
)


def _columns(names: str, **headings: str) -> dict[str, str]:
    return {name: headings.get(name, name) for name in names.split()}


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "op",
            "the op's paths against mlx-lm's, with the error beside the time",
            _columns(
                "H T candidate path ms us_per_token spread calls error", us_per_token="us a token"
            ),
            _op_arguments,
            _op_rows,
            "Inputs of `--row`, every call from the state that the one before left; spread is that "
            "between the quartiles over the median; error is that of the output against float64.",
        ),
        Benchmark(
            "model",
            "prefill and decode of an MLX folder against mlx-lm's class",
            _columns(
                "context phase candidate ms tokens_per_second spread launches peak_mb",
                tokens_per_second="tokens/s",
                peak_mb="peak MB",
            ),
            _model_arguments,
            _model_rows,
            "The same folder for all. Prefill is each library's own: mlx-lm leaves the head out "
            "until the last token, ours computes it for that token alone; decode is one loop. On "
            "a Linux CPU how weights lie in memory is part of the difference: our loader lays "
            "them out for its BLAS, mlx-lm's does not, and the third candidate is its model with "
            "our layout. Launches are nodes of this device's graph.",
        ),
        Benchmark(
            "profile",
            "where the time of a prefill and of a decode step goes, by kind of work",
            {
                **_columns("phase tokens part ms share spread"),
                "as stored ms": "ms, weights as stored",
            },
            _profile_arguments,
            _profile_rows,
            "Every part waited for by itself, medians; of nested parts the inner one counts. The "
            "last two rows of a phase: the same step left alone, and what waiting cost.",
        ),
        Benchmark(
            "launches",
            "kernels that a decode step of Kimi Linear 48B asks of a GPU, counted",
            _columns("candidate q_bits launches", q_bits="bits"),
            _launches_arguments,
            _launches_rows,
            "Counted from the graph as it is built with Metal, for the 48B's layers; nothing ran.",
        ),
        Benchmark(
            "counters",
            "what a kernel asks of a GPU, from the emulator, beside mlx-lm's and MLX's",
            _columns(
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
            "convert",
            "seconds and peak memory against mlx_lm.convert",
            _columns(
                "candidate q_bits seconds slowest peak_mb failed", q_bits="bits", peak_mb="peak MB"
            ),
            _convert_arguments,
            _convert_rows,
            "Each conversion is a process of its own; peak is its highest resident memory.",
        ),
        Benchmark(
            "quality",
            "perplexity on a text, by recipe of quantisation",
            _columns(
                "recipe bits_per_weight mb bits_per_byte perplexity divergence divergence_error "
                "gates_divergence gates_divergence_error",
                bits_per_weight="bits a weight",
                mb="MB",
                bits_per_byte="bits a byte",
                divergence_error="±",
                gates_divergence="of it by the gates",
                gates_divergence_error="±",
            ),
            _quality_arguments,
            _quality_rows,
            "Divergence: from the first recipe's distributions, nats a token, ± standard error; by "
            "the gates: what quantising the gate path added to it.",
        ),
        Benchmark(
            "cuda",
            "every path on a CUDA GPU beside FLA and FlashKDA, with the errors beside the times",
            _columns(
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
        Benchmark(
            "endurance",
            "memory over long runs of a small random model of 24 layers",
            _columns(
                "run policy tokens resident_mb arrays peak_mb cache_mb tokens_per_second",
                resident_mb="resident MB",
                arrays="live arrays",
                peak_mb="peak MB",
                cache_mb="cache MB",
                tokens_per_second="tokens/s",
            ),
            _endurance_arguments,
            _endurance_rows,
        ),
    )
}
