"""`verify`: whether a converted folder is whole, well-formed, and close to its source."""

from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UserError
from ..format import listed
from ..models import read_runnable_config
from ..models.tensor_roles import by_family
from ..weights.source import open_source, read_config
from ..weights.weight_mapping import Progress
from .checks import Verification
from .journal import digest_of
from .layout import Layout, Wish, lay_out
from .output import read_report
from .sample import sample_tokens
from .soundness import check_files, check_index, check_shapes, check_tokenizer, check_values

# Beside the source with noise as large as the rounding (see `compare`): its KL divergence times
# the first, its top-1 agreement less the second.
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
        folder: what `convert` wrote, or another MLX folder.
        source: folder or hub id that it was made from.
        tokens: text file, or a .json list of ids, to compare logits on; by default a built-in text.
        max_kl, min_top1: bounds of the mean KL divergence and of the top-1 agreement; by default
            what noise as large as the rounding does to the source, with a margin.
        max_tokens: how many tokens of the text are used.

    Raises UserError where a folder is no checkpoint, or the text cannot be read.
    """
    folder = Path(folder).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no converted model: it has no config.json")
    result = Verification(str(folder))
    report = read_report(folder)
    check_files(result, folder, report, progress)
    check_index(result, folder, report)
    try:
        read_runnable_config(read_config(folder))
    except CheckpointError as error:
        result.add("config", str(error), "a model that is built here", False)
        return result
    result.add("config", "parses", "a model that is built here", True)
    try:
        layout = lay_out(open_source(folder), Wish())
    except CheckpointError as error:
        result.add("tensors", str(error), "every tensor there, of the right shape", False)
        return result
    check_shapes(result, layout, report)
    check_tokenizer(result, layout.source, report, layout.config.vocab_size)
    check_values(result, layout, progress)
    if source is not None and not result.ok:
        result.add("source", "not compared", "a folder that passes the checks above", False)
    elif source is not None:
        _check_source(result, layout, report, source, revision, tokens, max_tokens, progress)
        _check_logits(result, max_kl, min_top1)
    return result


def _check_source(
    result: Verification,
    layout: Layout,
    report: dict[str, Any] | None,
    source: str | Path,
    revision: str | None,
    tokens: str | Path | None,
    max_tokens: int,
    progress: Progress | None,
) -> None:
    from .compare import compare  # its layers stand on mlx-lm, which is slow to import

    origin = lay_out(open_source(source, revision), Wish(dequantize=True))
    ids = sample_tokens(layout.source.folder, layout.config.vocab_size, tokens, max_tokens)
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if getattr(origin.config, name) != getattr(layout.config, name):
            raise UserError(f"{source} is another model: its {name} differs from the output's")
    found = compare(origin, layout, ids, progress)
    result.comparison = found
    if report is not None and report.get("source_hash"):
        same = digest_of(found.digests) == report["source_hash"]
        result.add("source", "the same" if same else "another", "the one in conversion.json", same)
    for family in by_family(layout.outputs.items()):
        if (one := found.families.get(family)) is not None:
            share = f"; {one.worst_share:.0%} of its bound in {one.worst}" if one.error else ""
            if one.failed:
                share = f"; beyond the bound: {listed(one.failed)}"
            result.add(
                f"error of {family}", f"{one.error:.3g}{share}", "by its bits", not one.failed
            )


def _check_logits(result: Verification, max_kl: float | None, min_top1: float | None) -> None:
    found = result.comparison
    kl = KL_FACTOR * found.noise_kl + 1e-5 if max_kl is None else max_kl
    top1 = max(0.0, found.noise_top1 - TOP1_MARGIN) if min_top1 is None else min_top1
    result.add(
        "KL divergence",
        f"{found.kl:.3g} (largest {found.kl_max:.3g}) on {found.tokens:,} tokens",
        f"<= {kl:.3g}",
        found.kl <= kl,
    )
    result.add("top-1 agreement", f"{found.top1:.1%}", f">= {top1:.0%}", found.top1 >= top1)
