"""What a converted folder says of itself: a page of text, and a model card for the hub."""

import shlex
from pathlib import Path

from ..format import size
from .layout import Wish
from .report import ConversionReport

PAGE, CARD = "conversion.txt", "README.md"


def command(wish: Wish) -> str:
    """The options of `mlx-kda convert` for a wish."""
    options = {
        "--dtype": wish.dtype,
        "--q-bits": wish.q_bits,
        "--q-group-size": wish.q_group_size,
        "--q-mode": None if wish.q_mode == "affine" else wish.q_mode,
        "--target-bpw": wish.target_bpw,
    }
    words = [
        f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"
        for flag, value in options.items()
        if value is not None
    ]
    words += [f"--q-rule {shlex.quote(rule)}" for rule in wish.q_rules]
    return " ".join(words + (["--dequantize"] if wish.dequantize else []))


def page(report: ConversionReport) -> str:
    """The report as a page of text."""
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


def card(report: ConversionReport, folder: Path) -> str:
    """The model card: base model, recipe, sizes, the command that makes it again, how to run it."""
    base = report.source_name if report.revision else None
    head = ["---", "library_name: mlx", "pipeline_tag: text-generation"]
    head += ["tags:", "- mlx", "- mlx-kda", f"- {report.model_type}"]
    if base:
        head += [f"base_model: {base}"]
        head += ["base_model_relation: quantized"] if report.quantization else []
    licences = sorted(path.name for path in folder.glob("LICENSE*"))
    if licences:
        head += ["license: other", f"license_link: {licences[0]}"]
    again = " ".join(["mlx-kda convert", base or "SRC", "OUT", report.command]).strip()
    stock = report.model_type == "kimi_linear"  # mlx-lm has no class for the others
    other = ", or with `mlx_lm.chat --model FOLDER` of mlx-lm" if stock else ""
    revision = f" at revision `{report.revision}`" if report.revision else ""
    rows = [
        ("base model", f"`{report.source_name}`{revision}"),
        ("recipe", report.how()),
        ("parameters", f"{report.parameters:,}"),
        ("size", f"{size(report.bytes_out)}, {report.bits_per_weight:.2f} bits a weight"),
        ("converted by", f"mlx-kda {report.version}"),
    ]
    return "\n".join(
        [
            *head,
            "---",
            "",
            f"# {report.source_name}, {report.how()}",
            "",
            f"An MLX conversion of `{report.source_name}`.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            "Made by",
            "",
            f"    {again}",
            "",
            f"Run it with `mlx-kda chat FOLDER`{other}.",
            f"What each family of tensors holds, and checksums, are in `{PAGE}`; the same for",
            "programs is in `conversion.json`. `mlx-kda verify FOLDER` checks the files.",
            "",
        ]
    )
