"""Convert a Hugging Face checkpoint, from a local folder or the hub, to a folder that MLX runs.

Weights are streamed, so that memory holds about one layer at a time. --resume continues a
conversion that was interrupted.
"""

import argparse
import json
import re
from typing import Any

from ..errors import UserError
from ..weights.folders import HUB_ID
from . import loading, options, output
from .options import BITS, add_json, add_option, add_revision
from .signals import exit_on_signals

SUMMARY = "convert a Hugging Face checkpoint to MLX"
EXAMPLE = (
    "mlx-kda convert path/to/Kimi-Linear-48B-A3B-Instruct kimi-4bit --q-bits 4\n"
    "  mlx-kda convert path/to/Kimi-Linear-48B-A3B-Instruct kimi-4bit --q-bits 4 --resume\n"
    "  mlx-kda convert owner/model out --target-bpw 4.5 --plan\n"
    "  mlx-kda convert path/to/checkpoint out --q-rule 'mlp.switch_mlp.*=4,64' "
    "--q-rule 'self_attn.o_proj=8,64'"
)
LARGEST = 10**15  # bytes of an output file
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="folder or hub id of the checkpoint")
    parser.add_argument(
        "out",
        type=options.file_name,
        metavar="OUT",
        help="folder to write; it must be new or empty",
    )
    add_revision(parser)
    parser.add_argument(
        "--plan", action="store_true", help="report what the conversion needs; write nothing"
    )
    parser.add_argument("--resume", action="store_true", help="continue an unfinished conversion")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace OUT, and any unfinished conversion to it"
    )
    add_option(
        parser,
        "--shard-size",
        "SIZE",
        byte_size,
        "largest weight file, as in 500M or 5G (default: 5G)",
        5 * 10**9,
    )
    parser.add_argument(
        "--upload-repo", metavar="OWNER/NAME", help="upload OUT to the hub when it is complete"
    )
    add_json(parser, "print the report as one JSON object")

    recipe = parser.add_argument_group("recipe")
    recipe.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16", "fp32", "fp16", "bf16"),
        help="dtype of the weights that are not quantised, except gates and router bias, which "
        "stay float32 (default: the checkpoint's)",
    )
    add_option(
        recipe,
        "--q-bits",
        "N",
        options.one_of(*BITS),
        "quantise to N bits: 2, 3, 4, 5, 6 or 8. Norms, convolutions and the gate path (under "
        "1 %% of a large model) are not quantised, the router gets at least 8 bits (default: no "
        "quantisation)",
    )
    add_option(
        recipe,
        "--q-group-size",
        "N",
        options.one_of(16, 32, 64, 128),
        "weights that share a scale: 16, 32, 64 or 128 (default: the mode's own)",
    )
    recipe.add_argument(
        "--q-mode",
        choices=("affine", "mxfp4", "mxfp8", "nvfp4"),
        default="affine",
        help="format of the quantised weights; mxfp4 and nvfp4 have 4 bits, mxfp8 has 8 "
        "(default: affine)",
    )
    recipe.add_argument(
        "--q-rule",
        action="append",
        default=[],
        metavar="PATTERN=HOW",
        help="for weights whose path ends with PATTERN, which may hold *: BITS,GROUP[,MODE] or "
        "keep; may be repeated, the last rule that matches wins",
    )
    add_option(
        recipe,
        "--target-bpw",
        "X",
        options.number(float, 2, 16),
        "average bits per weight, 2 to 16, gate path included, spent where they change the "
        "predictions most (results in docs/quality.md)",
    )
    recipe.add_argument(
        "--dequantize", action="store_true", help="unpack a source that is quantised"
    )


def byte_size(text: str) -> int:
    """A type for an option: bytes, with K, M, G or T."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)b?", text.strip().lower())
    size = float(found[1]) * UNITS[found[2]] if found else 0
    if not 1 <= size <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 500M or 5G")
    return int(size)


def run(args: argparse.Namespace) -> int:
    loading.check_folder(args.source)
    if args.q_mode != "affine" and args.q_bits is None and args.target_bpw is None:
        args.q_bits = 8 if args.q_mode == "mxfp8" else 4  # the only width of the mode
    if args.q_group_size is not None and args.q_bits is None and args.target_bpw is None:
        raise UserError("--q-group-size needs --q-bits N or --target-bpw X: add one of them")
    if args.upload_repo is not None and not HUB_ID.match(args.upload_repo):
        raise UserError(f"--upload-repo {args.upload_repo} is not of the form owner/name")
    recipe = {
        "dtype": args.dtype,
        "q_bits": args.q_bits,
        "q_group_size": args.q_group_size,
        "q_mode": args.q_mode,
        "q_rules": args.q_rule,
        "target_bpw": args.target_bpw,
        "dequantize": args.dequantize,
    }
    if args.plan:
        return _plan(args, recipe)
    with exit_on_signals():  # on SIGTERM, too, finished files are kept and temporary ones removed
        return _convert(args, recipe)


def _convert(args: argparse.Namespace, recipe: dict[str, Any]) -> int:
    from ..convert import convert
    from ..weights import hub

    with output.byte_progress("converting") as progress:
        report = convert(
            args.source,
            args.out,
            **recipe,
            revision=args.revision,
            resume=args.resume,
            overwrite=args.overwrite,
            shard_bytes=args.shard_size,
            progress=progress,
            log=output.note,
        )
    for warning in report.warnings:
        output.note(f"warning: {warning}")
    if args.json:
        print(json.dumps(report.as_dict(), ensure_ascii=False))
    else:
        print("\n".join(report.lines()))
    if args.upload_repo:
        with output.status(f"uploading to {args.upload_repo}"):
            address = hub.upload(args.out, args.upload_repo)
        output.note(f"uploaded to {address}")
    return 0


def _plan(args: argparse.Namespace, recipe: dict[str, Any]) -> int:
    from ..convert import plan

    found = plan(
        args.source, args.out, **recipe, revision=args.revision, shard_bytes=args.shard_size
    )
    if args.json:
        print(json.dumps(found.as_dict(), ensure_ascii=False))
    else:
        print("\n".join(found.lines()))
    if found.problems:
        raise UserError("; ".join(found.problems))
    return 0
