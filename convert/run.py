"""`convert`: a Hugging Face checkpoint in, an MLX folder out, one tensor in memory at a time."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import UserError
from ..files import write_text
from ..models.tensor_roles import by_family
from ..weights.source import INDEX, open_source
from ..weights.weight_mapping import Progress
from .budget import spend
from .building import LOCK, building, locked, tidy
from .card import CARD, PAGE, card, command, page
from .companions import Companions, read_companions, write_companions
from .journal import Journal, source_hash
from .layout import Layout, Wish, bits_by_family, changed_dtypes, identity_hash, lay_out
from .output import (
    REPORT,
    check_output,
    named,
    partial_of,
    read_report,
    size_if_file,
    size_of,
    space_problem,
    write_json,
)
from .quantise import Finished
from .report import ConversionReport, starred
from .shards import SHARD_BYTES, holds, into_shards, outputs_of, write_weights
from .written_config import written_config


def convert(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str = "affine",
    q_rules: Sequence[str] = (),
    target_bpw: float | None = None,
    dequantize: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
    revision: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ConversionReport:
    """Convert a checkpoint to an MLX folder that mlx-kda and stock mlx-lm load.

    Args:
        source: folder with config.json and safetensors, or a hub id "owner/name". Never changed.
        out: folder to make. It appears under this name only when it is whole.
        dtype: "float32", "float16" or "bfloat16"; by default that of most of the source's bytes.
            Gate parameters (A_log, dt_bias) and the router's bias are float32 in any case.
        q_bits, q_group_size, q_mode: quantise by the default recipe (see `recipe`); q_mode is
            "affine", "mxfp4", "mxfp8" or "nvfp4".
        q_rules: "PATTERN=BITS,GROUP[,MODE]" or "PATTERN=keep" for weights that the pattern names;
            a later rule goes before an earlier one.
        target_bpw: stored bits a weight, spent where the measured error is largest (see `budget`).
        dequantize: unpack a source that came quantised.
        resume: go on with an unfinished conversion of the same source by the same recipe.
        overwrite: replace an output that mlx-kda wrote before, and an unfinished one.
        progress: called as progress(bytes written, bytes in all, what is being written).
        say: hears a line when an unfinished conversion is found, and when one is left.
        revision: branch, tag or commit of a hub id.
        shard_bytes: size of an output file, exceeded only by a tensor larger than it.

    Returns the report, which is also in the output as conversion.json, as a page of text and as a
    model card.

    Raises UserError or CheckpointError: one line saying what is wrong with the source, the output
    or the wish. What was finished then, or on KeyboardInterrupt, is kept for `resume`.
    """
    start = time.perf_counter()
    wish = Wish(dtype, q_bits, q_group_size, q_mode, tuple(q_rules), target_bpw, dequantize)
    if shard_bytes < 1:
        raise UserError(f"the shard size must be positive, got {shard_bytes}")
    out = named(out)
    origin = open_source(source, revision, download=False)
    layout = lay_out(origin, wish)
    identity = layout.identity(shard_bytes)
    if resume and (whole := finished_before(out, identity, overwrite, say)):
        return whole
    check_output(out, origin.folder, overwrite)
    needed = max(0, layout.expected_bytes - size_of(partial_of(out)))
    space = space_problem(out, needed, origin.folder, origin.download_bytes)
    if problem := space or layout.memory_problem():
        raise UserError(problem)
    companions = read_companions(origin)

    def check() -> None:
        check_output(out, origin.folder, overwrite)

    with locked(out) as partial:
        # Another process may have finished since it was looked at.
        if resume and (whole := finished_before(out, identity, overwrite, say)):
            return whole
        with building(out, partial, identity, resume, overwrite, say, check) as journal:
            if layout.recipe and layout.recipe.target_bpw is not None:
                spend(layout, journal, progress)
            shards = into_shards(layout.steps, shard_bytes)
            wanted = {name: holds(steps) for name, steps in shards.items()}
            take_up(journal, wanted, say if resume else lambda line: None)
            report = begin_report(layout, out, identity)
            write_companions(layout, companions, journal.folder, report)
            write_weights(layout, shards, journal, progress)
            report.files = {
                name: {"bytes": facts["bytes"], "sha256": facts["sha256"]}
                for name, facts in sorted(journal.files.items())
            }
            report.source_hash = source_hash(journal)
            report.seconds = round(time.perf_counter() - start, 3)
            finish_folder(layout, companions, shards, journal.folder, report)
    return report


def finished_before(
    out: Path, identity: dict[str, Any], overwrite: bool, say: Callable[[str], None]
) -> ConversionReport | None:
    """The report of an output that this very conversion has written before, None if it did not.

    Where a weight file of it is gone or has another size, it is to be overwritten; raises UserError
    where it may not be. `verify` is what reads the files.
    """
    content = read_report(out)
    if content is None or content.get("identity") != identity_hash(identity):
        return None
    for name, facts in content["files"].items():
        if size_if_file(out / name) != facts["bytes"]:
            if overwrite:
                return None
            raise UserError(
                f"{out / name} is missing or cut short: pass --overwrite to convert again"
            )
    tidy(out)
    say(f"{out} is whole already: nothing is left to do")
    return ConversionReport.from_dict(content | {"out": str(out)})


def take_up(journal: Journal, wanted: dict[str, str], say: Callable[[str], None]) -> None:
    """Take over what an unfinished conversion has finished, checked by its checksums."""
    if not journal.is_begun:
        return say("there is no unfinished conversion: beginning with the first file")
    damaged = journal.take(wanted, lambda name: say(f"checking {name}"))
    for name in damaged:
        say(f"{name} is damaged or of another choice, and is written again")
    done = f"{len(journal.files)} of {len(wanted)} files done"
    say(f"going on with an unfinished conversion: {done}")
    return journal.clear(keep={LOCK})


def begin_report(layout: Layout, out: Path, identity: dict[str, Any]) -> ConversionReport:
    """The report, but for what is known only at the end."""
    recipe, mapping, source = layout.recipe, layout.mapping, layout.source
    outputs = layout.outputs
    return ConversionReport(
        source=source.name,
        revision=source.revision,
        out=str(out),
        model_type=layout.config.model_type,
        layers=layout.config.num_hidden_layers,
        dtype=layout.dtype_name,
        parameters=mapping.parameters,
        tensors_in=len(source.tensors),
        tensors_out=len(outputs),
        bytes_in=source.nbytes,
        bytes_out=layout.nbytes,
        recipe=recipe.describe() if recipe else None,
        command=command(layout.wish),
        quantization=layout.quantization,
        bits=bits_by_family(layout),
        kept=starred(recipe.kept) if recipe else {},
        cast=starred(changed_dtypes(mapping, layout.dtype, layout.wish.dtype is not None)),
        dropped=mapping.dropped,
        notes=layout.view.notes,
        families=by_family(outputs.items()),
        version=__version__,
        identity=identity_hash(identity),
    )


def finish_folder(
    layout: Layout,
    companions: Companions,
    shards: dict[str, list[Finished]],
    folder: Path,
    report: ConversionReport,
) -> None:
    """Write the index, the report, the model card, and at the very end config.json."""
    places = {key: name for name, steps in shards.items() for key in outputs_of(steps)}
    index = {
        "metadata": {"total_size": report.bytes_out, "total_parameters": report.parameters},
        "weight_map": dict(sorted(places.items())),
    }
    write_json(folder / INDEX, index)
    config, warnings = written_config(
        layout.view.config, layout.config, layout.dtype, layout.quantization, companions.eos_ids
    )
    report.warnings += warnings
    config["mlx_kda"] = report.provenance()
    write_json(folder / REPORT, report.as_published())
    write_text(folder / PAGE, page(report))
    write_text(folder / CARD, card(report, folder))
    write_json(folder / "config.json", config)
