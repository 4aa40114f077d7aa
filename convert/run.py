"""`convert`: a Hugging Face checkpoint in, an MLX folder out, one tensor in memory at a time."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_kda import __version__
from mlx_kda.errors import UserError
from mlx_kda.tokenizer import end_ids, read_tokenizer, write_tokenizer

from .families import by_family, map_checkpoint
from .output import (
    REPORT,
    check_output,
    check_space,
    copy_file,
    new_file,
    partial_folder,
    write_json,
)
from .quantise import Recipe, finish_step, is_cast
from .report import ConversionReport, starred
from .source import INDEX, Source, open_source, read_json
from .steps import Mapping, Step
from .written_config import written_config
from .writing import write_file

SHARD_BYTES = 5_000_000_000
DTYPE_WORDS = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "fp32": mx.float32,
    "fp16": mx.float16,
    "bf16": mx.bfloat16,
}
Progress = Callable[[int, int, str], None]


def convert(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str = "affine",
    overwrite: bool = False,
    progress: Progress | None = None,
    revision: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ConversionReport:
    """Convert a checkpoint to an MLX folder that mlx-kda and stock mlx-lm load.

    Args:
        source: folder with config.json and safetensors, or a hub id "owner/name". Never changed.
        out: folder to make. It appears under this name only when it is whole.
        dtype: "float32", "float16" or "bfloat16"; by default that of most of the source's bytes.
            Gate parameters (A_log, dt_bias) and the router's bias are float32 in any case.
        q_bits, q_group_size, q_mode: quantise by the default recipe (see `quantise`); q_mode is
            "affine", "mxfp4", "mxfp8" or "nvfp4".
        overwrite: replace an output that mlx-kda wrote before.
        progress: called as progress(bytes written, bytes in all, what is being written).
        revision: branch, tag or commit of a hub id.
        shard_bytes: size of an output file, exceeded only by a tensor larger than it.

    Returns the report, which is also in the output as conversion.json.

    Raises UserError or CheckpointError: one line saying what is wrong with the source, the output
    or the wish. No output is left behind then, nor on KeyboardInterrupt.
    """
    start = time.perf_counter()
    recipe = Recipe.make(q_bits, q_group_size, q_mode)
    if dtype is not None and dtype not in DTYPE_WORDS:
        raise UserError(f"--dtype {dtype} is not known; choose float32, float16 or bfloat16")
    if shard_bytes < 1:
        raise UserError(f"the shard size must be positive, got {shard_bytes}")
    out = Path(out).expanduser()
    origin = open_source(source, revision)
    check_output(out, origin.folder, overwrite)
    config, mapping = map_checkpoint(origin.config, origin.tensors)
    if recipe and mapping.packed:
        raise UserError(f"{source} is quantised already; convert the unquantised checkpoint")
    cast_to = DTYPE_WORDS[dtype] if dtype else common_dtype(mapping)
    steps = [finish_step(step, cast_to, recipe) for step in mapping.steps]
    outputs = {name: spec for step in steps for name, spec in step.outputs.items()}
    total = sum(spec.nbytes for spec in outputs.values())
    check_space(out, total)
    quantization = recipe.as_config() if recipe else packed_config(mapping)
    tokenizer = read_tokenizer(origin.folder, origin.config)
    generation = read_generation(origin.folder)
    eos_ids = end_ids(tokenizer, origin.config, generation)
    written, warnings = written_config(origin.config, config, cast_to, quantization, eos_ids)

    report = ConversionReport(
        source=origin.name,
        revision=origin.revision,
        out=str(out),
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        dtype=str(cast_to).removeprefix("mlx.core."),
        parameters=mapping.parameters,
        tensors_in=len(origin.tensors),
        tensors_out=len(outputs),
        bytes_in=origin.nbytes,
        bytes_out=total,
        quantization=quantization,
        kept=starred(recipe.kept) if recipe else {},
        cast=starred(changed_dtypes(mapping, cast_to, all_of_it=dtype is not None)),
        dropped=mapping.dropped,
        families=by_family(outputs.items()),
        warnings=warnings,
        version=__version__,
    )
    with partial_folder(out) as folder:
        if tokenizer is None:
            report.warnings.append("the source has no tokenizer")
        else:
            report.tokenizer = write_tokenizer(tokenizer, folder, origin.config)
        copy_licences(origin.folder, folder)
        if eos_ids:
            generation["eos_token_id"] = eos_ids
        if generation:
            write_json(folder / "generation_config.json", generation)
        report.files = write_weights(
            origin, steps, folder, shard_bytes, mapping.parameters, progress
        )
        report.seconds = round(time.perf_counter() - start, 3)
        write_json(folder / REPORT, report.as_published())
        write_json(folder / "config.json", written)
    return report


def common_dtype(mapping: Mapping) -> mx.Dtype:
    """The dtype that holds most bytes among the tensors whose dtype may change."""
    bytes_of: Counter = Counter()
    for name, spec in mapping.outputs.items():
        if is_cast(name, spec):
            bytes_of[spec.dtype] += spec.nbytes
    return bytes_of.most_common(1)[0][0]


def changed_dtypes(mapping: Mapping, dtype: mx.Dtype, all_of_it: bool) -> dict[str, str]:
    """What a cast to `dtype` changes: every tensor if that was asked for, else the odd ones."""
    if all_of_it:
        kinds = {s.dtype for n, s in mapping.outputs.items() if is_cast(n, s)} - {dtype}
        changes = sorted(_change(kind, dtype) for kind in kinds)
        return {"all but gate parameters": ", ".join(changes)} if changes else {}
    return {
        name: _change(spec.dtype, dtype)
        for name, spec in mapping.outputs.items()
        if is_cast(name, spec) and spec.dtype != dtype
    }


def _change(before: mx.Dtype, after: mx.Dtype) -> str:
    return f"{before} -> {after}".replace("mlx.core.", "")


def packed_config(mapping: Mapping) -> dict[str, Any] | None:
    """The `quantization` entry for weights that came quantised: the commonest form, the others."""
    if not mapping.packed:
        return None
    forms = [tuple(sorted(form.items())) for form in mapping.packed.values()]
    default = dict(Counter(forms).most_common(1)[0][0])
    return default | {path: form for path, form in mapping.packed.items() if form != default}


def write_weights(
    origin: Source,
    steps: list[Step],
    folder: Path,
    shard_bytes: int,
    parameters: int,
    progress: Progress | None,
) -> dict[str, dict[str, Any]]:
    """Write all weight files and their index; only one step's tensors are in memory at a time."""
    shards = into_shards(steps, shard_bytes)
    total = sum(spec.nbytes for step in steps for spec in step.outputs.values())
    files, places, done = {}, {}, 0
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        specs = {key: spec for step in shard for key, spec in step.outputs.items()}

        def arrays(shard: list[Step] = shard) -> Iterator[tuple[str, mx.array]]:
            nonlocal done
            for step in shard:
                yield from step.run(origin.read).items()
                mx.clear_cache()
                done += sum(spec.nbytes for spec in step.outputs.values())
                if progress and step.outputs:
                    progress(done, total, next(iter(step.outputs)))

        with new_file(folder / name) as temporary:
            digest = write_file(temporary, specs, arrays())
            files[name] = {"bytes": temporary.stat().st_size, "sha256": digest}
        places |= dict.fromkeys(specs, name)
    index = {
        "metadata": {"total_size": total, "total_parameters": parameters},
        "weight_map": dict(sorted(places.items())),
    }
    write_json(folder / INDEX, index)
    return files


def into_shards(steps: list[Step], shard_bytes: int) -> list[list[Step]]:
    """Group steps in order so that each file stays within its size; one step is never split."""
    shards: list[list[Step]] = [[]]
    size = 0
    for step in steps:
        nbytes = sum(spec.nbytes for spec in step.outputs.values())
        if size + nbytes > shard_bytes and size:
            shards.append([])
            size = 0
        shards[-1].append(step)
        size += nbytes
    return shards


def copy_licences(source: Path, folder: Path) -> None:
    """Copy the licence files, which bind the converted weights too."""
    for path in sorted(source.glob("LICENSE*")):
        if path.is_file():
            copy_file(path, folder / path.name)


def read_generation(folder: Path) -> dict[str, Any]:
    """generation_config.json of a folder, {} if there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}
