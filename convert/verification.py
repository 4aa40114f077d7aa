"""`verify`: whether a converted folder is whole, well-formed, and close to its source."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_kda.errors import CheckpointError, UserError

from .builder import FLOATS, listed
from .compare import Comparison, compare
from .families import by_family
from .journal import file_hash
from .layout import DTYPE_WORDS, Layout, Wish, lay_out
from .output import read_report
from .quantise import is_cast, is_finite
from .reader import Reader
from .run import digest_of
from .sample import sample_tokens
from .source import open_source

Progress = Callable[[int, int, str], None]

# Beside the source with noise as large as the rounding (see `compare`): its KL divergence times
# the first, its top-1 agreement less the second.
KL_FACTOR, TOP1_MARGIN = 3.0, 0.1


@dataclass
class Check:
    """One line of the table."""

    what: str
    found: str
    bound: str
    ok: bool


@dataclass
class Verification:
    """The checks of a folder, and the comparison with its source if there was one."""

    folder: str
    checks: list[Check] = field(default_factory=list)
    comparison: Comparison | None = None

    @property
    def ok(self) -> bool:
        """Whether no bound was passed."""
        return all(check.ok for check in self.checks)

    def add(self, what: str, found: str, bound: str, ok: bool) -> None:
        """Add a line."""
        self.checks.append(Check(what, found, bound, ok))

    def as_dict(self) -> dict[str, Any]:
        """The verification as JSON takes it."""
        result = {"folder": self.folder, "ok": self.ok, "checks": [asdict(c) for c in self.checks]}
        if self.comparison:
            facts = asdict(self.comparison)
            del facts["digests"]
            for name, family in self.comparison.families.items():
                facts["families"][name]["error"] = family.error
            result["comparison"] = facts
        return result


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
    _check_files(result, folder, report, progress)
    try:
        opened = open_source(folder)
        layout = lay_out(opened, Wish())
    except CheckpointError as error:
        result.add("tensors", str(error), "every tensor there, of the right shape", False)
        return result
    _check_shapes(result, layout, report)
    _check_values(result, layout, progress)
    if source is not None and result.ok:
        _check_source(result, layout, report, source, revision, tokens, max_tokens, progress)
        _check_logits(result, max_kl, min_top1)
    return result


def _check_files(
    result: Verification, folder: Path, report: dict[str, Any] | None, progress: Progress | None
) -> None:
    if report is None:
        result.add("checksums", "no conversion.json: not checked", "-", True)
        return
    files = report.get("files") or {}
    total, done, wrong = sum(facts["bytes"] for facts in files.values()), 0, []
    for name, facts in files.items():

        def heard(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            if progress:
                progress(done, max(done, total), f"reading {name}")

        if file_hash(folder / name, heard) != facts["sha256"]:
            wrong.append(name if (folder / name).is_file() else f"{name} (missing)")
    right = f"{len(files) - len(wrong)} of {len(files)} files"
    found = f"{right}; wrong: {listed(wrong)}" if wrong else right
    result.add("checksums", found, "as in conversion.json", not wrong and bool(files))


def _check_shapes(result: Verification, layout: Layout, report: dict[str, Any] | None) -> None:
    outputs, config = layout.mapping.outputs, layout.source.config
    stored = layout.source.tensors
    count = len(layout.source.tensors)
    right = report is None or count == report["tensors_out"]
    result.add("tensors", f"{count}, all of the right shape", "every tensor of the model", right)
    stated = DTYPE_WORDS.get(str(config.get("torch_dtype")), layout.dtype)
    odd = []
    for name, spec in outputs.items():
        if spec.dtype in FLOATS:
            wanted = stated if is_cast(name, spec) else mx.float32
            kept = stored.get(name, spec).dtype
            if kept != wanted:
                odd.append(f"{name} ({kept})".replace("mlx.core.", ""))
    found = f"{len(odd)} others: {listed(odd)}" if odd else "right"
    expected = f"{stated}, gates and router bias float32".removeprefix("mlx.core.")
    result.add("dtypes", found, expected, not odd)
    if layout.mapping.packed or config.get("quantization"):
        odd = _misstated(layout, config.get("quantization") or {})
        found = (
            f"{len(odd)} others: {listed(odd)}" if odd else f"{len(layout.mapping.packed)} packed"
        )
        result.add("quantisation", found, "config.json says what the shapes say", not odd)


def _misstated(layout: Layout, settings: dict[str, Any]) -> list[str]:
    """Packed weights of which the config says something else than their shapes."""
    default = {key: settings.get(key) for key in ("group_size", "bits")}
    default["mode"] = settings.get("mode", "affine")
    odd = []
    for path, form in layout.mapping.packed.items():
        own = settings.get(path)
        stated = {"mode": "affine"} | own if isinstance(own, dict) else default
        if any(stated.get(key) != value for key, value in form.items()):
            odd.append(path)
    return odd


def _check_values(result: Verification, layout: Layout, progress: Progress | None) -> None:
    tensors = layout.source.tensors
    names = [name for name, stored in tensors.items() if stored.dtype in FLOATS]
    total, done, wrong = sum(tensors[name].nbytes for name in names), 0, []
    with Reader(layout.source, names) as reader:
        for name in names:
            if not is_finite(reader(name)):
                wrong.append(name)
            done += tensors[name].nbytes
            if progress:
                progress(done, total, f"looking for NaN in {name}")
    found = f"{len(wrong)} are not: {listed(wrong)}" if wrong else "all"
    result.add("finite", found, "all", not wrong)


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
