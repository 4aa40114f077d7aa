"""Convert a Hugging Face checkpoint, a local folder or a hub id, to a folder that MLX runs."""

import argparse
import json

from mlx_kda.cli import common
from mlx_kda.errors import UserError

SUMMARY = "convert a Hugging Face checkpoint to MLX"
EXAMPLE = (
    "mlx-kda convert path/to/Kimi-Linear-48B-A3B-Instruct kimi-4bit --q-bits 4\n"
    "  mlx-kda convert path/to/checkpoint out --dtype float32"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="folder or hub id of the checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder to write; it must not exist")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of the weights (default: the checkpoint's); gates and router bias stay float32",
    )
    parser.add_argument(
        "--q-bits", type=int, choices=(2, 3, 4, 5, 6, 8), metavar="N", help="quantise to N bits"
    )
    parser.add_argument(
        "--q-group-size",
        type=int,
        choices=(16, 32, 64, 128),
        metavar="N",
        help="weights that share a scale (default: the mode's own)",
    )
    parser.add_argument(
        "--q-mode",
        choices=("affine", "mxfp4", "mxfp8", "nvfp4"),
        default="affine",
        help="default: affine",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.q_bits is None and (args.q_group_size is not None or args.q_mode != "affine"):
        raise UserError("--q-group-size and --q-mode need --q-bits: add it, for example --q-bits 4")

    from mlx_kda.convert import convert

    with common.progress("writing", unit="MB") as bar:
        report = convert(
            args.source,
            args.out,
            dtype=args.dtype,
            q_bits=args.q_bits,
            q_group_size=args.q_group_size,
            q_mode=args.q_mode,
            overwrite=args.overwrite,
            progress=lambda done, total, name: bar(done / 1e6, total / 1e6),
        )
    for warning in report.warnings:
        common.note(f"warning: {warning}")
    if args.json:
        print(json.dumps(report.as_dict(), ensure_ascii=False))
    else:
        print("\n".join(report.lines()))
    return 0
