"""What goes with the weights: the tokenizer, the settings of generation, the licences."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..tokenizer import end_ids, read_tokenizer, write_tokenizer
from ..weights.source import CheckpointSource, read_json
from .layout import Layout
from .output import copy_file, write_json
from .report import ConversionReport

GENERATION = "generation_config.json"


@dataclass
class Companions:
    """Tokenizer (None if the source has none), generation settings, ids that end a text."""

    tokenizer: Any
    generation: dict[str, Any]
    eos_ids: list[int]


def read_companions(source: CheckpointSource) -> Companions:
    """Read them; CheckpointError where a file is damaged."""
    tokenizer = read_tokenizer(source.folder, source.config)
    path = source.folder / GENERATION
    generation = read_json(path) if path.is_file() else {}
    return Companions(tokenizer, generation, end_ids(tokenizer, source.config, generation))


def write_companions(
    layout: Layout, companions: Companions, folder: Path, report: ConversionReport
) -> None:
    """Write them to an output, and say in the report what became of the tokenizer."""
    source = layout.source
    if companions.tokenizer is None:
        report.warnings.append("the source has no tokenizer")
    else:
        report.tokenizer = write_tokenizer(companions.tokenizer, folder, source.config)
    for path in sorted(source.folder.glob("LICENSE*")):
        if path.is_file():
            copy_file(path, folder / path.name)
    generation = dict(companions.generation)
    if companions.eos_ids:
        generation["eos_token_id"] = companions.eos_ids
    if generation:
        write_json(folder / GENERATION, generation)
