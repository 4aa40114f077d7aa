"""A command's model, tokenizer and session, and whether what is asked of them can fit."""

import argparse
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from . import checks
from .output import note, status

if TYPE_CHECKING:
    from ..cache import Policy


def locate(path: str) -> str:
    """The folder of a checkpoint that can run: the one named, or where a hub id was downloaded."""
    if checks.checkpoint(path) is not None:
        return path
    from ..weights.source import open_source

    folder = str(open_source(path).folder)
    checks.checkpoint(folder)
    return folder


def running(path: str) -> tuple[Any, int, str]:
    """Config, bytes of weights, and the dtype it computes in, of a checkpoint that can run.

    Of a hub id the small files and the headers are fetched, no weights.
    """
    from ..models import map_checkpoint
    from ..plan import activation_dtype
    from ..weights.source import open_source

    source = open_source(path, download=False)
    config, _ = map_checkpoint(source.config, source.tensors)
    sizes: Counter[str] = Counter()
    for stored in source.tensors.values():
        sizes[str(stored.dtype).removeprefix("mlx.core.")] += stored.nbytes
    dtypes = [name for name, _ in sizes.most_common()]
    return config, source.nbytes, activation_dtype(dtypes)


def note_policy(config: Any, policy: "Policy | None") -> None:
    """Say that a policy changes nothing, where a model has no layer that it could change."""
    if policy is not None and not policy.exact and "mla" not in config.layer_types:
        note(
            f"policy {policy} changes nothing here: this model has KDA layers only, whose cache "
            "does not grow"
        )


def check_context(config: Any, tokens: int) -> None:
    """Raise UserError for more tokens than the model was made for."""
    if tokens > config.model_max_length:
        raise UserError(
            f"{tokens:,} tokens are more than the model's context of "
            f"{config.model_max_length:,}: lower --context"
        )


def check_memory(args: argparse.Namespace, tokens: int, policy: "Policy | None") -> None:
    """Raise UserError where a text of so many tokens cannot fit, unless --force was given."""
    from .. import plan

    config, weights, dtype = running(args.model)
    tokens = min(tokens, config.model_max_length)
    wanted = plan.need(
        config, weights, plan.FLOATS[dtype], tokens, policy or "exact", args.prefill_step
    )
    if not args.force:
        plan.check(wanted)


def load_model(folder: str) -> Any:
    """The model of a folder, with a word on standard error meanwhile."""
    import mlx.core as mx

    from ..models import load_model as load

    with status(f"loading {folder}"):
        model = load(folder)
    if sys.stderr.isatty() and mx.default_device() == mx.cpu and model.model.dtype.size == 2:
        note("computing in 16 bits, at which MLX is slow on a CPU: convert with --dtype float32")
    limit = mx.device_info(mx.default_device()).get("max_recommended_working_set_size")
    if mx.metal.is_available() and limit:  # a Mac's CPU has no such limit
        # Weights kept resident: without it macOS may page them out between two tokens.
        mx.set_wired_limit(limit)
    return model


def load_session(args: argparse.Namespace, path: str, model: Any, tokenizer: Any) -> Any:
    """The session of a file; UserError where the command asks for another than it is."""
    from ..session import Session

    session = Session.load(path, model, tokenizer, prefill_step=args.prefill_step)
    if args.policy is not None and args.policy != session.policy:
        raise UserError(
            f"{path} was saved under the policy {session.policy}, not {args.policy}: leave out "
            "--policy, or name another file"
        )
    if args.system is not None and args.system != session.system:
        raise UserError(
            f"{path} has another system message: leave --system out, or name another file"
        )
    return session
