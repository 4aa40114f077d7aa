"""The model and session of a command, and whether they can be used and fit in memory.

What names and config.json show is checked before MLX is imported.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..models import read_config as parse_config
from ..weights.folders import find_folder, read_config, refuse_without_weights
from .output import note, status

if TYPE_CHECKING:
    from ..cache import Policy
    from ..session import Session


def check_folder(path: str) -> None:
    """Raise UserError for what is neither a folder with a config.json nor a hub id."""
    folder = find_folder(path)
    if folder is not None:
        read_config(folder)


def check_model(path: str) -> Any:
    """The config of a folder that can run; None for a hub id, about which nothing is known yet.

    Raises UserError for what is neither a folder nor a hub id, and CheckpointError for a folder
    whose config.json is missing, damaged or not supported, or that holds no weights.
    """
    folder = find_folder(path)
    if folder is None:
        return None
    config = parse_config(read_config(folder))
    if next(folder.glob("*.safetensors"), None) is None:
        refuse_without_weights(folder)
    return config


def check_writable(path: str | None, option: str) -> None:
    """Raise UserError if a file that is written at the end cannot be written."""
    if path is None:
        return
    if not path.strip():
        raise UserError(f"{option}: the name is empty")
    file = Path(path).absolute()
    if file.is_dir():
        raise UserError(f"{option} {path} is a folder: name a file")
    if not file.parent.is_dir():
        raise UserError(f"{option} {path}: the folder {file.parent} does not exist")
    if not os.access(file.parent, os.W_OK):
        raise UserError(f"{option} {path}: the folder {file.parent} is not writable")


def check_context(config: Any, tokens: int) -> None:
    """Raise UserError for more tokens than the model was made for."""
    if tokens > config.model_max_length:
        raise UserError(
            f"{tokens:,} tokens are more than the model's context of "
            f"{config.model_max_length:,}: lower --context"
        )


def check_memory(args: argparse.Namespace, tokens: int, policy: "Policy | None") -> None:
    """Raise UserError if so many tokens cannot fit, unless --force was given."""
    from .. import memory_plan

    config, weights, dtype = describe_source(args.model)
    tokens = min(tokens, config.model_max_length)
    wanted = memory_plan.need(
        config, weights, memory_plan.FLOATS[dtype], tokens, policy or "exact", args.prefill_step
    )
    if not args.force:
        memory_plan.check(wanted)


def note_policy(config: Any, policy: "Policy | None") -> None:
    """Print a note if the model has no layer that the policy could change."""
    if policy is not None and not policy.exact and "mla" not in config.layer_types:
        note(
            f"policy {policy} changes nothing here: this model has KDA layers only, whose cache "
            "does not grow"
        )


def describe_source(path: str) -> tuple[Any, int, str]:
    """(config, bytes of weights, dtype it computes in) of a checkpoint that can run.

    Of a hub id only the small files and the headers are downloaded, no weights.
    """
    from ..memory_plan import activation_dtype
    from ..models import map_checkpoint
    from ..weights.source import open_source

    source = open_source(path, download=False)
    config, _ = map_checkpoint(source.config, source.tensors)
    sizes: Counter[str] = Counter()
    for stored in source.tensors.values():
        sizes[str(stored.dtype).removeprefix("mlx.core.")] += stored.nbytes
    dtypes = [name for name, _ in sizes.most_common()]
    return config, source.nbytes, activation_dtype(dtypes)


def local_folder(path: str) -> str:
    """The folder of a checkpoint that can run: as given, or where a hub id was downloaded to."""
    if check_model(path) is not None:
        return path
    from ..weights.source import open_source

    folder = str(open_source(path).folder)
    check_model(folder)
    return folder


def load_model(folder: str) -> Any:
    """The model of a folder, with a spinner on standard error while it loads."""
    import mlx.core as mx

    from ..models import load_model as load

    with status(f"loading {folder}"):
        model = load(folder)
    if sys.stderr.isatty() and mx.default_device() == mx.cpu and model.model.dtype.size == 2:
        note("computing in 16 bits, which MLX does slowly on a CPU: convert with --dtype float32")
    limit = mx.device_info(mx.default_device()).get("max_recommended_working_set_size")
    if mx.metal.is_available() and limit:  # a Mac's CPU has no such limit
        # Weights kept resident: without it macOS may page them out between two tokens.
        mx.set_wired_limit(int(limit))
    return model


def open_session(
    args: argparse.Namespace, model: Any, tokenizer: Any, path: str | None, **options: Any
) -> "Session":
    """The session of a file, or a new one if ``path`` is None.

    Raises UserError if the command line asks for another policy or system message than the file's.
    """
    from ..session import Session

    note_policy(model.args, args.policy)
    options["prefill_step"] = args.prefill_step
    if path is None:
        return Session(model, tokenizer, args.policy or "exact", system=args.system, **options)
    session = Session.load(path, model, tokenizer, **options)
    if args.policy is not None and args.policy != session.policy:
        raise UserError(
            f"{path} was saved under the policy {session.policy}, not {args.policy}: leave out "
            "--policy, or name another file"
        )
    if args.system is not None and args.system != session.system:
        raise UserError(
            f"{path} has another system message: leave out --system, or name another file"
        )
    return session
