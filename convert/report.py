"""What a conversion did: counts, bytes, recipe, and every tensor left out or left alone."""

import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..format import size

WRITER = "mlx-kda"


@dataclass
class ConversionReport:
    """Returned by `convert`, and written without local paths to `conversion.json` in the output."""

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
    # SHA-256 over the digests of all source tensors read (see `journal.source_hash`)
    source_hash: str = ""
    # one text for source, recipe, shard size and version
    identity: str = ""
    # what was asked for: default packing, rules, target
    recipe: dict[str, Any] | None = None
    # the options of the command that makes this again
    command: str = ""
    quantization: dict[str, Any] | None = None
    # family -> how its matrices are stored -> how many
    bits: dict[str, dict[str, int]] = field(default_factory=dict)
    # path with the layer's number starred -> why it was not quantised
    kept: dict[str, str] = field(default_factory=dict)
    # path with the layer's number starred -> the dtypes from which and to which it was cast
    cast: dict[str, str] = field(default_factory=dict)
    # source tensor -> why it was left out
    dropped: dict[str, str] = field(default_factory=dict)
    # family -> tensors, bytes in the output
    families: dict[str, dict[str, int]] = field(default_factory=dict)
    # weight file -> bytes, sha256
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokenizer: str | None = None
    # what became of a source that was quantised
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    version: str = ""

    @property
    def bits_per_weight(self) -> float:
        """Stored bits for each parameter of the model."""
        return 8 * self.bytes_out / self.parameters if self.parameters else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON takes it."""
        return {"written_by": WRITER} | asdict(self) | {"bits_per_weight": self.bits_per_weight}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "ConversionReport":
        """The report that `as_dict` or `as_published` gave."""
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
            return f"mixed bits for {recipe['target_bpw']:g} a weight{rules}, rest {self.dtype}"
        others = [form for form in q.values() if isinstance(form, dict)]
        if recipe["default"] is None and others:  # no packing is the rule: name what there is
            bits = sorted({q["bits"], *(form["bits"] for form in others)})
            how = f"{' and '.join(map(str, bits))} bits"
        else:
            how = f"{q['bits']} bits ({q['mode']}, groups of {q['group_size']})"
        if recipe["rules"] and recipe["default"] is None:
            rules = " in what the rules name"
        return f"{how}{rules}, rest {self.dtype}"

    def lines(self) -> list[str]:
        """A short summary to print."""
        return [f"{self.source} -> {self.out}", *self.facts()]

    def facts(self) -> list[str]:
        """The summary without the paths."""
        lines = [
            f"{self.model_type}, {self.layers} layers, {self.parameters / 1e6:,.1f} M parameters",
            f"{self.how()}: {size(self.bytes_in)} -> {size(self.bytes_out)}, "
            f"{self.bits_per_weight:.2f} bits a weight",
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
    """The same paths with layer numbers starred, so that one line stands for all layers."""
    return {re.sub(r"\.layers\.\d+\.", ".layers.*.", path): why for path, why in paths.items()}
