"""The report of a conversion, and the pages it is written as: JSON, text and a model card."""

import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .. import __version__
from ..files import write_text
from ..format import size

WRITER = "mlx-kda"
REPORT, PAGE, CARD = "conversion.json", "conversion.txt", "README.md"


@dataclass
class ConversionReport:
    """What a conversion did: counts, bytes, recipe, and every tensor left out or not quantised.

    Returned by ``convert``, and written without local paths to ``conversion.json`` in the output.
    """

    source: str
    out: str
    model_type: str
    layers: int
    dtype: str
    parameters: int
    tensors_in: int
    tensors_out: int
    bytes_in: int
    bytes_out: int
    revision: str | None = None
    # SHA-256 over the digests of all source tensors read (see `resume.digest_of`)
    source_hash: str = ""
    # a hash of source, recipe, shard size and version
    identity: str = ""
    # what was asked for: default packing, rules, target
    recipe: dict[str, Any] | None = None
    # the options of the command that repeats the conversion
    command: str = ""
    quantization: dict[str, Any] | None = None
    # family -> how its matrices are stored -> how many
    bits: dict[str, dict[str, int]] = field(default_factory=dict)
    # path with * for the layer's number -> why it was not quantised
    kept: dict[str, str] = field(default_factory=dict)
    # path with * for the layer's number -> the dtypes before and after its cast
    cast: dict[str, str] = field(default_factory=dict)
    # source tensor -> why it was left out
    dropped: dict[str, str] = field(default_factory=dict)
    # family -> tensors, bytes in the output
    families: dict[str, dict[str, int]] = field(default_factory=dict)
    # weight file -> bytes, sha256
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokenizer: str | None = None
    # how a source that was quantised was read
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    version: str = __version__

    @property
    def bits_per_weight(self) -> float:
        """Stored bits for each parameter of the model."""
        return 8 * self.bytes_out / self.parameters if self.parameters else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {"written_by": WRITER} | asdict(self) | {"bits_per_weight": self.bits_per_weight}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "ConversionReport":
        """The report that ``as_dict`` or ``as_published`` gave."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in content.items() if key in known})

    def as_published(self) -> dict[str, Any]:
        """The report for the output folder: without paths and times of the machine that made it."""
        content = self.as_dict() | {"source": self.source_name}
        del content["out"], content["seconds"]
        return content

    @property
    def source_name(self) -> str:
        """The hub id, or the name of a local folder without its path."""
        return self.source if self.revision is not None else Path(self.source).name

    def provenance(self) -> dict[str, Any]:
        """Where the weights come from and how they were made, for config.json."""
        return {
            "version": self.version,
            "source": self.source_name,
            "revision": self.revision,
            "source_hash": self.source_hash,
            "recipe": self.recipe,
        }

    def how(self) -> str:
        """The recipe in a few words."""
        if not self.quantization:
            return self.dtype
        q, recipe = self.quantization, self.recipe or {"default": None, "rules": []}
        rules = ", with rules" if recipe["rules"] else ""
        if recipe.get("target_bpw"):
            average = f"{recipe['target_bpw']:g} per weight"
            return f"mixed bits averaging {average}{rules}, rest {self.dtype}"
        others = [packing for packing in q.values() if isinstance(packing, dict)]
        if recipe["default"] is None and others:  # there is no main packing: name all bits
            bits = sorted({q["bits"], *(packing["bits"] for packing in others)})
            how = f"{' and '.join(map(str, bits))} bits"
        else:
            how = f"{q['bits']} bits ({q['mode']}, groups of {q['group_size']})"
        if recipe["rules"] and recipe["default"] is None:
            rules = " where the rules apply"
        return f"{how}{rules}, rest {self.dtype}"

    def lines(self) -> list[str]:
        """A short summary to print."""
        return [f"{self.source} -> {self.out}", *self.facts()]

    def facts(self) -> list[str]:
        """The summary without the paths."""
        lines = [
            f"{self.model_type}, {self.layers} layers, {self.parameters / 1e6:,.1f} M parameters",
            f"{self.how()}: {size(self.bytes_in)} -> {size(self.bytes_out)}, "
            f"{self.bits_per_weight:.2f} bits per weight",
        ]
        for family, sums in self.families.items():
            stored = "; ".join(f"{n} x {how}" for how, n in self.bits.get(family, {}).items())
            tensors, held = f"{sums['tensors']:6d} tensors", size(sums["bytes"])
            lines.append(f"  {family:22s} {tensors} {held:>10s}  {stored}".rstrip())
        for reason in dict.fromkeys(self.kept.values()):
            paths = [path for path, why in self.kept.items() if why == reason]
            lines.append(f"not quantised, {reason}: {', '.join(paths)}")
        lines += [f"cast: {path} ({change})" for path, change in self.cast.items()]
        lines += [f"dropped: {name} ({reason})" for name, reason in self.dropped.items()]
        return [*lines, *self.notes, f"tokenizer: {self.tokenizer or 'none in the source'}"]


def starred(paths: dict[str, str]) -> dict[str, str]:
    """The same paths with * for layer numbers, so that one line stands for all layers."""
    return {re.sub(r"\.layers\.\d+\.", ".layers.*.", path): why for path, why in paths.items()}


def read_report(folder: Path) -> dict[str, Any] | None:
    """The report of the conversion that wrote a folder; None if it is missing or damaged."""
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        ConversionReport.from_dict(report | {"out": ""})  # TypeError if a fact is missing
        files = report["files"].values()
        valid = report["written_by"] == WRITER and isinstance(report["tensors_out"], int)
        if valid and all(isinstance(f["bytes"], int) and f["sha256"] for f in files):
            return report
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def write_report(folder: Path, report: ConversionReport) -> None:
    """Write the report to a folder: conversion.json, conversion.txt and the model card."""
    write_json(folder / REPORT, report.as_published())
    write_text(folder / PAGE, _page(report))
    write_text(folder / CARD, _card(report, folder))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file completely or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _page(report: ConversionReport) -> str:
    """The report as text, with the checksums of the weight files."""
    source = report.source_name + (f" at {report.revision}" if report.revision else "")
    lines = [
        f"Converted by mlx-kda {report.version}",
        f"from {source}",
        f"source tensors, SHA-256: {report.source_hash}",
        f"options: {report.command or 'none'}",
        "",
        *report.facts(),
        *(f"warning: {warning}" for warning in report.warnings),
        "",
        *(f"{facts['sha256']}  {name}" for name, facts in report.files.items()),
    ]
    return "\n".join(lines) + "\n"


def _card(report: ConversionReport, folder: Path) -> str:
    """The model card: base model, recipe, sizes, the command that repeats it, how to run it."""
    base = report.source_name if report.revision else None
    head = ["library_name: mlx", "pipeline_tag: text-generation"]
    head += ["tags:", "- mlx", "- mlx-kda", f"- {report.model_type}"]
    if base:
        head += [f"base_model: {base}"]
        head += ["base_model_relation: quantized"] if report.quantization else []
    if licences := sorted(path.name for path in folder.glob("LICENSE*")):
        head += ["license: other", f"license_link: {licences[0]}"]
    command = " ".join(["mlx-kda convert", base or "SRC", "OUT", report.command]).strip()
    stock = report.model_type == "kimi_linear"  # mlx-lm has no class for the others
    other = ", or with `mlx_lm.chat --model FOLDER` of mlx-lm" if stock else ""
    revision = f" at revision `{report.revision}`" if report.revision else ""
    front_matter = "\n".join(head)
    return f"""---
{front_matter}
---

# {report.source_name}, {report.how()}

An MLX conversion of `{report.source_name}`.

| | |
|---|---|
| base model | `{report.source_name}`{revision} |
| recipe | {report.how()} |
| parameters | {report.parameters:,} |
| size | {size(report.bytes_out)}, {report.bits_per_weight:.2f} bits per weight |
| converted by | mlx-kda {report.version} |

Made by

    {command}

Run it with `mlx-kda chat FOLDER`{other}.
`{PAGE}` lists what each family of tensors holds, and checksums; `{REPORT}` is the same
for programs. `mlx-kda verify FOLDER` checks the files.
"""
