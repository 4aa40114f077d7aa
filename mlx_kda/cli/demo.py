"""Convert a checkpoint to 4 bits, ask it three questions and let it go on from a text.

The checkpoint is examples/tiny-kimi-linear of this project's repository, or the one named.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_kda.cli import common

if TYPE_CHECKING:
    from mlx_kda.generate import Piece, Statistics

SUMMARY = "convert a small checkpoint and answer from it"
EXAMPLE = "mlx-kda demo\n  mlx-kda demo path/to/checkpoint --q-bits 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", nargs="?", metavar="SRC", help="default: examples/tiny-kimi-linear"
    )
    parser.add_argument("--q-bits", type=int, choices=(2, 3, 4, 5, 6, 8), default=4, metavar="N")
    parser.add_argument(
        "--max-tokens", type=common.number(int, 1), default=48, metavar="N", help="of each answer"
    )


def run(args: argparse.Namespace) -> int:
    from mlx_kda.demo import find_checkpoint

    start = time.perf_counter()
    source = find_checkpoint(args.source)
    with tempfile.TemporaryDirectory(prefix="mlx-kda-demo-") as scratch:
        out = Path(scratch) / f"{source.resolve().name}-{args.q_bits}bit"
        dtype = _convert(source, out, args.q_bits)
        _answer(out, args.max_tokens, dtype)
    seconds = time.perf_counter() - start
    print(f"\nAll of it took {seconds:.1f} s. The same with Kimi Linear 48B:")
    print("  mlx-kda convert moonshotai/Kimi-Linear-48B-A3B-Instruct kimi-4bit --q-bits 4")
    print("  mlx-kda chat kimi-4bit")
    return 0


def _convert(source: Path, out: Path, bits: int) -> str:
    """Convert in front of the user; the dtype that the model computes in."""
    from mlx_kda.convert import convert

    print(f"Converting {source} to {bits} bits", flush=True)
    with common.progress("writing", unit="MB") as bar:
        report = convert(
            source,
            out,
            q_bits=bits,
            progress=lambda done, total, name: bar(done / 1e6, total / 1e6),
        )
    print("\n".join(f"  {line}" for line in report.lines()))
    return report.dtype


def _answer(folder: Path, max_tokens: int, dtype: str) -> None:
    from mlx_kda.demo import OPENING, QUESTIONS
    from mlx_kda.generate import Statistics, stream_generate
    from mlx_kda.session import Session

    model, tokenizer = common.load_model(str(folder)), common.load_tokenizer(str(folder))
    if tokenizer.has_chat_template:
        conversation = Session(model, tokenizer)
        for question in QUESTIONS:
            statistics = Statistics()
            print(f"\n> {question}")
            _stream(conversation.send(question, max_tokens=max_tokens, statistics=statistics))
            _show(statistics)
    statistics = Statistics()
    print(f"\nGoing on from a text: {OPENING}", end="", flush=True)
    _stream(
        stream_generate(model, tokenizer, OPENING, max_tokens=max_tokens, statistics=statistics)
    )
    _show(statistics)
    paths = common.kda_paths(model.args, dtype, prompt=statistics.prefilled_tokens)
    print("\nWhich form of KDA ran:")
    for name, why in paths.items():
        print(f"  {name}: {why}")


def _stream(pieces: "Iterator[Piece]") -> None:
    for piece in pieces:
        common.write(piece.text)
    common.write("\n")


def _show(statistics: "Statistics") -> None:
    print("\n".join(f"  [{line}]" for line in common.describe(statistics)))
