"""Check the kernels against MLX's operations on this machine, and report what a model would use.

Without MODEL the shapes of Kimi Linear 48B are checked, with random weights.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from ..errors import UserError
from ..runners import RUNNERS
from . import loading
from .options import add_json, add_model, add_option, number

SUMMARY = "check the kernels on this machine"
# "ops" is for models only, and counting checks nothing.
CHOICES = (*(name for name in RUNNERS if name != "emulator-count"), "ops")
EXAMPLE = "mlx-kda doctor kimi-4bit\n  mlx-kda doctor --runner emulator-fast"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, nargs="?")
    parser.add_argument(
        "--runner",
        choices=CHOICES,
        default="auto",
        metavar="NAME",
        help="metal, cuda, emulator (with checks, slow), emulator-fast or ops (default: what a "
        "model would use here)",
    )
    heads = number(int, 1, 1024)
    add_option(parser, "--heads", "H", heads, "heads to check without MODEL (default: 32)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.model is not None:
        args.model = loading.local_folder(args.model)

    from .. import doctor
    from ..attention import resolve

    runner, reason = resolve(args.runner)
    _refuse_absent(runner)
    report: dict[str, Any] = {
        "machine": doctor.machine(),
        "runner": runner,
        "reason": reason,
        "checks": [],
    }
    if not args.json:
        for name, value in report["machine"].items():
            print(f"{name}: {value}")
        print(f"KDA layers run by: {runner} ({reason})")
    verdicts = []
    if runner != "ops":
        for verdict in _verdicts(args.model, args.heads or 32, runner):
            verdicts.append(verdict)
            report["checks"].append({"ok": verdict.ok, **vars(verdict)})
            if not args.json:
                mark = "ok " if verdict.ok else "BAD"
                print(f"{mark} {doctor.describe(verdict)}", flush=True)
    if args.json:
        print(json.dumps(report))
    elif runner == "ops":
        print("there are no kernels to check here: --runner emulator-fast runs them on the CPU")
    return 0 if all(v.ok for v in verdicts) else 1


def _refuse_absent(runner: str) -> None:
    """Raise UserError if a runner's GPU is missing."""
    import mlx.core as mx

    for name, backend, what in (
        ("metal", mx.metal, "an Apple GPU"),
        ("cuda", mx.cuda, "a CUDA GPU and MLX's build for it"),
    ):
        if runner == name and not backend.is_available():
            raise UserError(
                f"--runner {name} needs {what}: --runner emulator-fast runs the kernels on the CPU"
            )


def _verdicts(folder: str | None, heads: int, runner: str) -> Iterator[Any]:
    """The checks of a model's kernels, or of those for Kimi Linear 48B with random weights."""
    import mlx.core as mx

    from .. import doctor
    from ..layers import KimiDeltaAttention, MoE

    if folder is not None:
        model = loading.load_model(folder)
        yield from doctor.check_model(model, model.model.dtype, runner)
        return
    layer = KimiDeltaAttention(64, heads, 128, conv_kernel=4, norm_eps=1e-5)
    layer.dt_bias = mx.random.uniform(-4, 1, layer.dt_bias.shape)
    layer.eval()
    yield from doctor.check(layer, mx.bfloat16, runner)
    moe = MoE(64, 32, 256, top_k=8, scale=2.446)
    moe.e_score_correction_bias = mx.random.uniform(6.8, 7.1, (256,))
    moe.eval()
    yield doctor.check_router(moe, runner)
