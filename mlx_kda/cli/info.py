"""Describe a checkpoint and the memory that it needs.

Only the config and the file headers are read, no weights. Works with Hugging Face and MLX folders.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from ..cache.policy import Policy
from ..errors import CheckpointError, UserError
from ..format import size
from ..models import family, read_config
from ..weights.folders import find_folder
from ..weights.folders import read_config as read_json
from . import loading, reports
from .options import add_context, add_json, add_model, add_policy
from .output import print_table

SUMMARY = "describe a checkpoint and the memory it needs"
EXAMPLE = (
    "mlx-kda info kimi-4bit\n"
    "  mlx-kda info kimi-4bit --policy window:4096+16,int8 --context 1000000\n"
    "  mlx-kda info kimi-4bit --json"
)

FORMATS = {"mlx": "an MLX folder", "huggingface": "a Hugging Face folder"}
CONTEXTS = {"8K": 8 * 1024, "128K": 128 * 1024, "1M": 1024 * 1024}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, help="folder of a checkpoint, supported or not")
    add_policy(parser)
    add_context(parser, "tokens at which each layer's cache is measured")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    folder = find_folder(args.model)
    if folder is None:
        raise UserError(f"{args.model} is not a local folder: download it first")
    raw = read_json(folder)
    family(raw)
    report = describe(folder, args.policy or "exact", args.context)
    if args.json:
        report.pop("cache_lines", None)  # for people only
        print(json.dumps(report, ensure_ascii=False))
    else:
        print_table(_rows(report))
    if report["problem"] is not None:
        raise CheckpointError(f"{args.model} cannot run: {report['problem']}")
    return 0


def describe(folder: Path, policy: str | Policy = "exact", context: int = 131072) -> dict[str, Any]:
    """The report as plain data: sizes in bytes, the cache under ``policy``.

    A complete checkpoint that cannot run is described, too, with the reason under "problem".
    """
    from ..convert import inspect

    found = inspect(folder)
    report = {
        **found.as_dict(),
        "bits_per_weight": 8 * found.nbytes / found.parameters,
        "quantization": _quantization(found.quantization),
    }
    if found.problem is None:
        config = read_config(read_json(folder))
        loading.note_policy(config, Policy.parse(policy))
        report.update(_running(config, list(found.dtypes), policy, context))
    return report


def _running(config: Any, dtypes: list[str], policy: str | Policy, context: int) -> dict[str, Any]:
    """The cache that running it needs, and what runs its KDA layers."""
    from ..cache.policy import describe as describe_cache
    from ..memory_plan import FLOATS, activation_dtype
    from ..models.hybrid_config import KDA

    name = activation_dtype(dtypes)
    layers = describe_cache(config, policy, FLOATS[name])
    return {
        "dtype": name,
        "kda_heads": [config.linear_num_heads, config.linear_head_dim],
        "kda_value_heads": [config.linear_num_v_heads, config.linear_v_head_dim],
        "experts": [config.num_experts, config.num_experts_per_token],
        "policy": layers[0].asked,
        "state_bytes": sum(layer.fixed_bytes for layer in layers if layer.kind == KDA),
        "latent_bytes_per_token": sum(layer.token_bytes for layer in layers),
        "cache_bytes": {
            name: sum(layer.bytes_at(n) for layer in layers) for name, n in CONTEXTS.items()
        },
        "cache": [{**vars(layer), "bytes_at": layer.bytes_at(context)} for layer in layers],
        "cache_lines": reports.describe_layers(layers, context),
        "ops": reports.kda_paths(config, name),
    }


def _quantization(entry: dict[str, Any] | None) -> dict[str, Any] | None:
    """The default of a quantised model and how many modules differ from it."""
    if not entry:
        return None
    default = {k: v for k, v in entry.items() if not isinstance(v, (dict, bool))}
    return {**default, "exceptions": len(entry) - len(default)}


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    kinds = ", ".join(f"{n} {kind.upper()}" for kind, n in report["layer_types"].items())
    rows = [
        ("model", f"{report['model_type']}, {FORMATS[report['format']]}"),
        ("layers", f"{report['layers']}: {kinds}" if kinds else str(report["layers"])),
        ("parameters", _count(report["parameters"])),
        ("weights", f"{size(report['nbytes'])}, {report['bits_per_weight']:.2f} bits per weight"),
        ("", ", ".join(f"{name} {size(n)}" for name, n in report["dtypes"].items())),
        ("quantised", _describe_quantization(report["quantization"])),
    ]
    if report["problem"] is not None:
        return [*rows, ("problem", report["problem"])]
    experts, chosen = report["experts"]
    cache = ", ".join(f"{size(n)} at {length}" for length, n in report["cache_bytes"].items())
    return [
        *rows,
        ("KDA heads", _heads(report["kda_heads"], report["kda_value_heads"])),
        ("experts", f"{experts}, {chosen} per token" if experts else "none"),
        ("context", f"{report['context']:,} tokens"),
        ("computes in", report["dtype"]),
        *(("cache" if i == 0 else "", line) for i, line in enumerate(report["cache_lines"])),
        ("cache in total", f"{cache}; {size(report['latent_bytes_per_token'])} per token"),
        *((f"{name} runs", text) for name, text in report["ops"].items()),
    ]


def _heads(keys: list[int], values: list[int]) -> str:
    text = "{} of {}".format(*keys)
    return text if keys == values else text + ", {} of {} for values".format(*values)


def _describe_quantization(quantization: dict[str, Any] | None) -> str:
    if quantization is None:
        return "no"
    rest = dict(quantization)
    own = rest.pop("exceptions")
    text = ", ".join(f"{key} {value}" for key, value in rest.items())
    return f"{text}; {own} modules differ" if own else text


def _count(n: int) -> str:
    for unit, word in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if n >= unit:
            return f"{n / unit:.3g} {word}"
    return str(n)
