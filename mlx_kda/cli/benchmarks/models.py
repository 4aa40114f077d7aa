"""Benchmarks of whole models and of their conversion."""

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from .. import loading, options
from .kind import MOST, Benchmark, Rows, columns, timed

if TYPE_CHECKING:
    from ...bench.subject import Subject


def _subject_arguments(parser: argparse.ArgumentParser) -> None:
    """What model is run, and by what."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="folder of a checkpoint, or else --shape"
    )
    parser.add_argument("--shape", choices=("48b",), help="a random model of this shape instead")
    parser.add_argument(
        "--layers", type=options.number(int, 1, MOST), metavar="N", help="its first N"
    )
    parser.add_argument(
        "--vocab", type=options.number(int, 1, MOST), metavar="N", help="its vocabulary"
    )
    parser.add_argument(
        "--q-bits",
        type=int,
        choices=(4, 8),
        metavar="N",
        help="bits of its weights (default: not quantised)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of its activations (default: bfloat16)",
    )
    parser.add_argument("--runner", default="auto", help="of the KDA layers (default: auto)")
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), help="what MLX computes on (default: MLX's own choice)"
    )


def _subject(args: argparse.Namespace) -> "Subject":
    if args.model is not None and args.shape is None:
        loading.check_model(args.model)
    from ...bench.subject import Subject

    return Subject(args.model, **{name: getattr(args, name) for name in _SUBJECT})


_SUBJECT = ("shape", "layers", "vocab", "q_bits", "dtype", "runner", "device")


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    _subject_arguments(parser)
    timed(parser)
    parser.add_argument(
        "--contexts",
        type=options.numbers,
        default=[1024, 8192],
        metavar="N,N",
        help="tokens in the context (default: 1024,8192)",
    )
    parser.add_argument(
        "--candidates",
        choices=("both", "ours", "mlx-lm"),
        default="both",
        help="whose model to run (default: both, in turns)",
    )


def _model_rows(args: argparse.Namespace) -> Rows:
    subject = _subject(args)
    from ...bench import model

    candidates = model.CANDIDATES if args.candidates == "both" else (args.candidates,)
    return model.of(
        subject, candidates, contexts=args.contexts, samples=args.samples, budget=args.budget
    )


def _buffers_arguments(parser: argparse.ArgumentParser) -> None:
    _subject_arguments(parser)
    timed(parser)
    parser.add_argument(
        "--context",
        type=options.number(int, 1, MOST),
        default=1024,
        metavar="N",
        help="tokens in the context (default: 1024)",
    )
    parser.add_argument(
        "--rounds",
        type=options.number(int, 1, MOST),
        default=3,
        metavar="N",
        help="processes of each setting (default: 3)",
    )


def _buffers_rows(args: argparse.Namespace) -> Rows:
    _subject(args).prepare()
    from ...bench import buffers

    given = {name: getattr(args, name) for name in (*_SUBJECT, "samples", "budget")}
    options = [
        f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None
    ]
    model = [] if args.model is None else [args.model]
    return buffers.run([*model, *options, f"--contexts={args.context}"], args.rounds)


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    _subject_arguments(parser)
    timed(parser)
    parser.add_argument(
        "--tokens",
        type=options.number(int, 1, MOST),
        default=512,
        metavar="T",
        help="tokens of the prefill (default: 512)",
    )


def _profile_rows(args: argparse.Namespace) -> Rows:
    subject = _subject(args)
    from ...bench import profile

    return profile.of(subject, tokens=args.tokens, samples=args.samples, budget=args.budget)


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="folder of the checkpoint")
    parser.add_argument(
        "--q-bits", type=int, choices=(2, 3, 4, 5, 6, 8), metavar="N", help="quantise to N bits"
    )
    parser.add_argument(
        "--samples",
        type=options.number(int, 1, MOST),
        default=3,
        metavar="N",
        help="conversions by each (default: 3)",
    )


def _convert_rows(args: argparse.Namespace) -> Rows:
    loading.check_folder(args.source)
    from ...bench import conversion

    return conversion.run(Path(args.source), q_bits=args.q_bits, samples=args.samples)


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
    loading.check_folder(args.source)
    from ...bench import quality

    recipes = args.recipes.split(",") if args.recipes else quality.RECIPES
    return quality.run(args.source, quality.read(Path(args.text)), recipes)


def _endurance_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=options.number(int, 0, MOST),
        default=30_000,
        metavar="N",
        help="tokens to decode (default: 30000)",
    )
    parser.add_argument(
        "--prompts",
        type=options.numbers,
        default=[20_000, 100_000],
        metavar="N,N",
        help="tokens of each prompt (default: 20000,100000)",
    )
    parser.add_argument(
        "--policy",
        type=options.policy,
        default="window:1024+16",
        metavar="P",
        help="a cache policy (default: window:1024+16)",
    )


def _endurance_rows(args: argparse.Namespace) -> Rows:
    from ...bench import endurance

    return itertools.chain(
        endurance.decode(args.steps, policy=str(args.policy)),
        endurance.prompts(args.prompts, policy=str(args.policy)),
    )


MODELS = (
    Benchmark(
        "model",
        "prefill and decode of a model against mlx-lm's class",
        columns(
            "context phase candidate ms tokens_per_second spread launches peak_mb",
            tokens_per_second="tokens/s",
            peak_mb="peak MB",
        ),
        _model_arguments,
        _model_rows,
        "The same folder for all, or random weights of one shape. Prefill is each library's own, "
        "256 tokens at a time on a CPU and 2,048 on a GPU: mlx-lm leaves the head out until the "
        "last token, ours computes it for that token alone; decode is one loop. On a Linux CPU how "
        "weights lie in memory is part of the difference: "
        "our loader lays them out for its BLAS, mlx-lm's does not, and a third candidate is its "
        "model with our layout. Launches are nodes of this device's graph. A candidate is left out "
        "where a single prefill would take it twice the seconds allowed. A model that memory does "
        "not hold twice is measured by one library, then by the other (alone).",
    ),
    Benchmark(
        "profile",
        "where the time of a prefill and of a decode step goes, by kind of work",
        {
            **columns("phase tokens part ms share spread"),
            "as stored ms": "ms, weights as stored",
        },
        _profile_arguments,
        _profile_rows,
        "Every part waited for by itself, medians; of nested parts the inner one counts. The "
        "last two rows of a phase: the same step left alone, and what waiting cost.",
    ),
    Benchmark(
        "buffers",
        "prefill and decode with MLX's command buffers of several lengths",
        columns(
            "context phase candidate ms tokens_per_second spread peak_mb",
            candidate="MLX_MAX_OPS_PER_BUFFER, MLX_MAX_MB_PER_BUFFER",
            tokens_per_second="tokens/s",
            peak_mb="peak MB",
        ),
        _buffers_arguments,
        _buffers_rows,
        "Our model; a process for each setting and round, in turns. MLX ends a command buffer at "
        "either limit; MB are in truth millions of numbers. A CPU has no command buffers.",
    ),
    Benchmark(
        "convert",
        "seconds and peak memory against mlx_lm.convert",
        columns(
            "candidate q_bits seconds slowest peak_mb failed", q_bits="bits", peak_mb="peak MB"
        ),
        _convert_arguments,
        _convert_rows,
        "Each conversion is a process of its own, and starting it is most of a small one; peak is "
        "its highest resident memory.",
    ),
    Benchmark(
        "quality",
        "perplexity on a text, by recipe of quantisation",
        columns(
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
        "endurance",
        "memory over long runs of a small random model of 24 layers",
        columns(
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
