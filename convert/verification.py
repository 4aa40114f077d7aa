"""``verify``: whether a converted folder is complete, well-formed, and close to its source."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, UserError
from ..format import listed
from ..models import read_runnable_config
from ..models.tensor_roles import by_family
from ..tokenizer import load_tokenizer
from ..weights.source import open_source, read_config
from ..weights.weight_mapping import Progress
from .checks import (
    SAMPLE,
    Verification,
    check_files,
    check_index,
    check_shapes,
    check_tokenizer,
    check_values,
    has_tokenizer,
)
from .compare_errors import Comparison
from .conversion_plan import ConversionPlan, plan_conversion
from .recipe import ConvertOptions
from .report import read_report
from .resume import digest_of

ROW = 512  # tokens of one sequence; a longer text is cut into several
# The default bounds, relative to the source with noise as large as the rounding (see `compare`):
# its KL divergence times the first, its top-1 agreement less the second.
KL_FACTOR, TOP1_MARGIN = 3.0, 0.1


def verify(
    folder: str | Path,
    source: str | Path | None = None,
    tokens: str | Path | None = None,
    *,
    revision: str | None = None,
    max_kl: float | None = None,
    min_top1: float | None = None,
    max_tokens: int = 2048,
    progress: Progress | None = None,
) -> Verification:
    """Check a converted folder; with its source, compare weights and logits too.

    Args:
        folder: what ``convert`` wrote, or another MLX folder.
        source: folder or hub id that it was made from.
        tokens: text file, or a .json list of ids, to compare logits on; by default a built-in text.
        max_kl, min_top1: bounds of the mean KL divergence and of the top-1 agreement; by default
            what noise as large as the rounding does to the source, with a margin.
        max_tokens: how many tokens of the text are used.

    Raises UserError where a folder is no checkpoint, or the text cannot be read. Every other fault
    is a failed check of the result.
    """
    folder = Path(folder).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a converted model: it has no config.json")
    result = Verification(str(folder))
    report = read_report(folder)
    check_files(result, folder, report, progress)
    check_index(result, folder, report)
    try:
        read_runnable_config(read_config(folder))
    except CheckpointError as error:
        result.add("config", str(error), "a supported model", False)
        return result
    result.add("config", "parses", "a supported model", True)
    try:
        plan = plan_conversion(open_source(folder), ConvertOptions())
    except CheckpointError as error:
        result.add("tensors", str(error), "every tensor there, of the right shape", False)
        return result
    check_shapes(result, plan, report)
    check_tokenizer(result, plan.source, report, plan.config.vocab_size)
    check_values(result, plan, progress)
    if source is not None and not result.ok:
        result.add("source", "not compared", "a folder that passes the checks above", False)
    elif source is not None:
        from .compare import compare  # imports mlx-lm, which is slow

        origin = plan_conversion(open_source(source, revision), ConvertOptions(dequantize=True))
        ids = sample_tokens(folder, plan.config.vocab_size, tokens, max_tokens)
        for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
            if getattr(origin.config, name) != getattr(plan.config, name):
                raise UserError(f"{source} is another model: its {name} differs from the output's")
        found = result.comparison = compare(origin, plan, ids, progress)
        _check_source(result, plan, report, found)
        _check_logits(result, found, max_kl, min_top1)
    return result


def _check_source(
    result: Verification, plan: ConversionPlan, report: dict[str, Any] | None, found: Comparison
) -> None:
    """The source is that of the report, and every weight is as close to it as its bits allow."""
    if report is not None and report.get("source_hash"):
        same = digest_of(found.digests) == report["source_hash"]
        result.add("source", "the same" if same else "another", "the one in conversion.json", same)
    for family in by_family(plan.outputs.items()):
        if (one := found.families.get(family)) is not None:
            share = f"; {one.worst_share:.0%} of its bound in {one.worst}" if one.error else ""
            if one.failed:
                share = f"; beyond the bound: {listed(one.failed)}"
            result.add(
                f"error of {family}", f"{one.error:.3g}{share}", "by its bits", not one.failed
            )


def _check_logits(
    result: Verification, found: Comparison, max_kl: float | None, min_top1: float | None
) -> None:
    kl = KL_FACTOR * found.noise_kl + 1e-5 if max_kl is None else max_kl
    top1 = max(0.0, found.noise_top1 - TOP1_MARGIN) if min_top1 is None else min_top1
    result.add(
        "KL divergence",
        f"{found.kl:.3g} (largest {found.kl_max:.3g}) on {found.tokens:,} tokens",
        f"<= {kl:.3g}",
        found.kl <= kl,
    )
    result.add("top-1 agreement", f"{found.top1:.1%}", f">= {top1:.0%}", found.top1 >= top1)


def sample_tokens(folder: Path, vocab_size: int, given: str | Path | None, limit: int) -> mx.array:
    """Ids [B, T] of a text by the tokenizer of a folder, or of a .json list of ids.

    Without ``given`` they are those of the built-in text, or fixed ids if there is no tokenizer.
    Raises UserError where the file cannot be read, has fewer than two tokens or invalid ids.
    """
    ids = _given(folder, Path(given)) if given is not None else _built_in(folder, vocab_size)
    ids = ids[:limit]
    if len(ids) < 2:
        raise UserError(f"{given or 'the text'} has fewer than two tokens")
    if not all(isinstance(i, int) and 0 <= i < vocab_size for i in ids):
        raise UserError(f"{given} contains ids outside 0 to {vocab_size - 1:,}")
    if len(ids) > ROW:
        ids = ids[: len(ids) // ROW * ROW]
    return mx.array(ids).reshape(-1, min(len(ids), ROW))


def _given(folder: Path, path: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not UTF-8 text") from error
    if path.suffix != ".json":
        return _encode(folder, text)
    try:
        ids = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(ids, list):
        raise UserError(f"{path} must hold a list of token ids")
    return ids


def _built_in(folder: Path, vocab_size: int) -> list[int]:
    if not has_tokenizer(folder):
        return [7919 * i * i % vocab_size for i in range(1, ROW + 1)]
    return _encode(folder, SAMPLE)


def _encode(folder: Path, text: str) -> list[int]:
    if not has_tokenizer(folder):
        raise UserError(f"{folder} has no tokenizer: give --tokens a .json file of ids")
    return list(load_tokenizer(folder).encode(text))
