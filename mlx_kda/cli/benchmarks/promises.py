"""The kinds of `mlx-kda bench` that hold a promise: they write a page of docs/, and exit with 1.

The others measure; these compare what they measured with a bound.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...bench import constant_page, streaming_page
from ...errors import UserError
from .. import loading, options
from ..output import note
from .kind import MOST, Benchmark


@dataclass(frozen=True)
class Promise(Benchmark):
    """A benchmark with a page, and with what a row or all of them may not do."""

    page: Callable[[dict[str, Any], list[dict[str, Any]]], str] = lambda about, rows: ""
    broken: Callable[[list[dict[str, Any]]], list[str]] = lambda rows: []


def _constant_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of a pure KDA model")
    parser.add_argument(
        "--text", required=True, metavar="FILE", help="read over and over, in UTF-8"
    )
    parser.add_argument(
        "--tokens",
        type=options.number(int, 1, MOST),
        default=200_000,
        metavar="N",
        help="tokens of the text (default: 200000)",
    )
    parser.add_argument(
        "--every",
        type=options.number(int, 1, MOST),
        default=20_000,
        metavar="N",
        help="tokens between two rows (default: 20000)",
    )


def _constant_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = loading.check_model(args.model)
    if config is not None and set(config.layer_types) != {"kda"}:
        raise UserError(f"{args.model} has layers that are not KDA: its memory is not constant")
    text = _read(args.text)
    from ...bench import constant

    return constant.run(args.model, text, args.tokens, args.every)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _streaming_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="FOLDER", help="where the checkpoint and the outputs go, about 20 GB"
    )
    numbers = {
        "layers": (40, "layers of the checkpoint"),
        "experts": (64, "experts of a layer"),
        "samples": (3, "conversions by each"),
    }
    for name, (default, what) in numbers.items():
        parser.add_argument(
            f"--{name}",
            type=options.number(int, 1, 1000),
            default=default,
            metavar="N",
            help=f"{what} (default: {default})",
        )


def _streaming_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    work = Path(args.folder) / "mlx-kda-streaming"
    if work.exists():
        raise UserError(f"{work} is there already: remove it, or name another folder")
    from ...bench import streaming

    return streaming.measure(work, args.layers, args.experts, args.samples, note)


PROMISES = (
    Promise(
        "constant",
        "whether a pure KDA model's memory stays the same over a long text",
        constant_page.COLUMNS,
        _constant_arguments,
        _constant_rows,
        page=constant_page.page,
        broken=constant_page.growth,
    ),
    Promise(
        "streaming",
        "whether conversions keep their promises: memory, time, bits, going on after a kill",
        {
            "recipe": "recipe",
            "seconds": "seconds",
            "plain_seconds": "seconds of a plain copy",
            "ratio": "ratio",
            "peak": "peak bytes",
            "bound": "bound of it",
            "same_bits": "same bits",
            "same_files": "same files after kills",
        },
        _streaming_arguments,
        _streaming_rows,
        page=streaming_page.page,
        broken=streaming_page.broken,
    ),
)
