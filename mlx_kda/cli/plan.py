"""Predict the memory that a model needs at a context length, under each cache policy.

Only the config and the file headers are read, no weights. Works with Hugging Face and MLX folders.
"""

import argparse
import json
from typing import Any

from ..format import size
from . import loading, output
from .options import add_context, add_json, add_model, add_policy, add_prefill_step
from .output import print_table

SUMMARY = "predict the memory that a model needs at a context length"
EXAMPLE = (
    "mlx-kda plan kimi-4bit --context 131072\n"
    "  mlx-kda plan kimi-4bit --context 1000000 --policy window:8192+64,int8 --json"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_context(parser, "tokens of prompt and answer")
    add_policy(
        parser,
        "a cache policy to show, may be repeated: ",
        default="the usual ones",
        action="append",
    )
    add_prefill_step(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    config = loading.check_model(args.model)
    if config is not None:
        loading.check_context(config, args.context)

    from .. import memory_plan
    from ..step import prefill_step

    if args.prefill_step is None:
        args.prefill_step = prefill_step()
    config, weights, dtype = loading.describe_source(args.model)
    loading.check_context(config, args.context)
    for policy in args.policy or ():
        loading.note_policy(config, policy)
    memory = memory_plan.machine()
    policies = args.policy or memory_plan.POLICIES
    needs = [
        memory_plan.need(
            config, weights, memory_plan.FLOATS[dtype], args.context, policy, args.prefill_step
        )
        for policy in policies
    ]
    if args.json:
        rows = [
            {**vars(one), "total": one.total, "fits": one.total <= memory.usable} for one in needs
        ]
        report = {"context": args.context, "memory": vars(memory), "policies": rows}
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print(args, dtype, memory, needs)
    return 0


def _print(args: argparse.Namespace, dtype: str, memory: Any, needs: list[Any]) -> None:
    from ..cache import DEFAULT_BUDGET

    columns = ("weights", "KDA states", "latents", "working set", "total")
    rows = []
    for one in needs:
        sizes = (one.weights, one.states, one.latents, one.working, one.total)
        fits = "fits" if one.total <= memory.usable else "does not fit"
        rows.append((one.policy, *(size(n) for n in sizes), fits))
    output.paragraph(f"{args.model}: {args.context:,} tokens, computing in {dtype}")
    print_table(rows, ("policy", *columns, ""), right=columns)
    output.paragraph(
        f"this machine: {size(memory.total)}, of which {size(memory.usable)} usable "
        f"({memory.source})"
    )
    output.paragraph(
        f"working set: predicted for a prefill step of {args.prefill_step:,} tokens; "
        "windows and int8 or int4 are approximations"
    )
    output.paragraph(f"a session also holds up to {size(DEFAULT_BUDGET)} of session checkpoints")
