"""The files beside the weights: config.json, tokenizer, generation settings, licences."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..files import new_file
from ..models import own_config
from ..models.hybrid_config import HybridConfig
from ..tokenizer import end_ids, read_tokenizer, write_tokenizer
from ..tokenizer.files import TokenizerFiles
from ..weights.source import CheckpointSource, read_json
from .report import ConversionReport, write_json

GENERATION = "generation_config.json"
# Remote code, settings of other quantisers, and keys that are written again.
DROPPED = {
    "auto_map",
    "quantization",
    "quantization_config",
    "_name_or_path",
    "transformers_version",
    "model_file",
    "dtype",
    "torch_dtype",
}


@dataclass
class AuxFiles:
    """Tokenizer (None if the source has none), generation settings, ids of the end tokens."""

    tokenizer: TokenizerFiles | None
    generation: dict[str, Any]
    eos_ids: list[int]


def read_aux_files(source: CheckpointSource) -> AuxFiles:
    """Read them from a source; CheckpointError where a file is damaged."""
    tokenizer = read_tokenizer(source.folder, source.config)
    path = source.folder / GENERATION
    generation = read_json(path) if path.is_file() else {}
    return AuxFiles(tokenizer, generation, end_ids(tokenizer, source.config, generation))


def write_aux_files(
    files: AuxFiles, source: CheckpointSource, folder: Path, report: ConversionReport
) -> None:
    """Write all but config.json to an output; the report gets what became of the tokenizer."""
    if files.tokenizer is None:
        report.warnings.append("the source has no tokenizer")
    else:
        report.tokenizer = write_tokenizer(files.tokenizer, folder, source.config)
    for path in sorted(source.folder.glob("LICENSE*")):
        if path.is_file():
            with new_file(folder / path.name) as temporary:
                shutil.copyfile(path, temporary)
    generation = dict(files.generation)
    if files.eos_ids:
        generation["eos_token_id"] = files.eos_ids
    if generation:
        write_json(folder / GENERATION, generation)


def output_config(
    raw: dict[str, Any],
    config: HybridConfig,
    dtype: mx.Dtype,
    quantization: dict | None,
    eos_ids: list[int],
) -> tuple[dict[str, Any], list[str]]:
    """The config.json to write, and warnings about what stock mlx-lm does not understand.

    It is in the family's own dialect; unknown keys of the source are kept.
    ``quantization`` is in mlx-lm's form: a default and an entry for each weight that differs.
    """
    raw = {key: value for key, value in raw.items() if key not in DROPPED}
    result, warnings = own_config(raw, config)
    result["torch_dtype"] = str(dtype).removeprefix("mlx.core.")
    if eos_ids:
        result["eos_token_id"] = eos_ids if len(eos_ids) > 1 else eos_ids[0]
    if quantization:
        result |= {"quantization": quantization, "quantization_config": quantization}
    return dict(sorted(result.items())), warnings
