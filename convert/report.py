"""What a conversion did: counts, bytes, recipe, and every tensor left out or left alone."""

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    quantization: dict[str, Any] | None = None
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

    def as_published(self) -> dict[str, Any]:
        """The report for the output folder: without the paths of the machine that made it."""
        content = self.as_dict()
        del content["out"]
        if self.revision is None:
            content["source"] = Path(self.source).name
        return content

    def lines(self) -> list[str]:
        """A short summary to print."""
        how = self.dtype
        if self.quantization:
            q = self.quantization
            how = f"{q['bits']} bits ({q['mode']}, groups of {q['group_size']}), rest {self.dtype}"
        lines = [
            f"{self.source} -> {self.out}",
            f"{self.model_type}, {self.layers} layers, {self.parameters / 1e6:,.1f} M parameters",
            f"{how}: {in_words(self.bytes_in)} -> {in_words(self.bytes_out)}, "
            f"{self.bits_per_weight:.2f} bits a weight",
        ]
        lines += [
            f"  {family:22s} {sums['tensors']:6d} tensors {in_words(sums['bytes']):>10s}"
            for family, sums in self.families.items()
        ]
        for reason in dict.fromkeys(self.kept.values()):
            paths = [path for path, why in self.kept.items() if why == reason]
            lines.append(f"not quantised, {reason}: {', '.join(paths)}")
        lines += [f"cast: {path} ({change})" for path, change in self.cast.items()]
        lines += [f"dropped: {name} ({reason})" for name, reason in self.dropped.items()]
        return [*lines, f"tokenizer: {self.tokenizer or 'none in the source'}"]


def in_words(nbytes: float) -> str:
    """A number of bytes in decimal units."""
    if nbytes < 1000:
        return f"{nbytes:.0f} bytes"
    unit, size = ("kB", 1e3) if nbytes < 1e6 else ("MB", 1e6) if nbytes < 1e9 else ("GB", 1e9)
    return f"{nbytes / size:.1f} {unit}"


def starred(paths: dict[str, str]) -> dict[str, str]:
    """The same paths with layer numbers starred, so that one line stands for all layers."""
    return {re.sub(r"\.layers\.\d+\.", ".layers.*.", path): why for path, why in paths.items()}
