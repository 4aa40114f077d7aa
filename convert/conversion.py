"""``convert``: a Hugging Face checkpoint in, an MLX folder out, one tensor in memory at a time."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import UserError
from ..files import new_file
from ..models.tensor_roles import by_family
from ..weights.safetensors import Pieces
from ..weights.safetensors_writer import write_file
from ..weights.source import INDEX, Reader, open_source
from ..weights.weight_mapping import Progress
from .aux_files import output_config, read_aux_files, write_aux_files
from .bit_budget import spend
from .conversion_plan import (
    SHARD_BYTES,
    ConversionPlan,
    identity_hash,
    outputs_of,
    plan_conversion,
)
from .output_dir import (
    LOCK,
    building,
    check_output,
    locked,
    output_path,
    partial_of,
    size_if_file,
    size_of,
    space_problem,
    tidy,
)
from .quantise import OutputStep
from .recipe import ConvertOptions
from .report import ConversionReport, read_report, starred, write_json, write_report
from .resume import ResumeState, digest_of


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
    log: Callable[[str], None] = lambda message: None,
    revision: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ConversionReport:
    """Convert a checkpoint to an MLX folder that mlx-kda and stock mlx-lm load.

    Args:
        source: folder with config.json and safetensors, or a hub id "owner/name". Never changed.
        out: folder to write. It gets this name only when it is complete.
        dtype: "float32", "float16" or "bfloat16"; default: that of most of the source's bytes.
            Gate parameters (A_log, dt_bias) and the router's bias are always float32.
        q_bits, q_group_size, q_mode: quantise by the default recipe (see ``recipe.py``); q_mode is
            "affine", "mxfp4", "mxfp8" or "nvfp4".
        q_rules: "PATTERN=BITS,GROUP[,MODE]" or "PATTERN=keep" for the weights that match; a later
            rule takes precedence.
        target_bpw: stored bits per weight, spent where the measured error is largest (see
            ``bit_budget.py``).
        dequantize: dequantise a source that is quantised.
        resume: continue an unfinished conversion of the same source with the same options.
        overwrite: replace an output that mlx-kda wrote, or an unfinished one.
        progress: called as progress(bytes written, total bytes, tensor name).
        log: called with a message when an unfinished conversion is found, and when one is left.
        revision: branch, tag or commit of a hub id.
        shard_bytes: size of an output file; only a single larger tensor exceeds it.

    Returns the report. The output holds it as conversion.json, as text and as a model card.

    Raises UserError or CheckpointError, one line that says what is wrong with the source, the
    output or the options. Finished files are kept for ``resume`` then, and on KeyboardInterrupt.
    """
    start = time.perf_counter()
    options = ConvertOptions(
        dtype, q_bits, q_group_size, q_mode, tuple(q_rules), target_bpw, dequantize
    )
    if shard_bytes < 1:
        raise UserError(f"the shard size must be positive, got {shard_bytes}")
    out = output_path(out)
    origin = open_source(source, revision, download=False)
    plan = plan_conversion(origin, options)
    identity = plan.identity(shard_bytes)
    if resume and (finished := _finished_before(out, identity, overwrite, log)):
        return finished
    check_output(out, origin.folder, overwrite)
    needed = max(0, plan.expected_bytes - size_of(partial_of(out)))
    space = space_problem(out, needed, origin.folder, origin.download_bytes)
    if problem := space or plan.memory_problem():
        raise UserError(problem)
    aux_files = read_aux_files(origin)

    def check() -> None:
        check_output(out, origin.folder, overwrite)

    with locked(out) as partial:
        # Another process may have finished since the first look.
        if resume and (finished := _finished_before(out, identity, overwrite, log)):
            return finished
        with building(out, partial, identity, resume, overwrite, log, check) as state:
            if plan.has_budget:
                spend(plan, state, progress)
            shards = plan.shards(shard_bytes)
            _take_finished(state, shards, log if resume else lambda message: None)
            report = _begin_report(plan, out, identity)
            write_aux_files(aux_files, origin, partial, report)
            _write_weights(plan, shards, state, progress)
            report.files = {
                name: {"bytes": facts["bytes"], "sha256": facts["sha256"]}
                for name, facts in sorted(state.files.items())
            }
            sources = [facts["sources"] for facts in state.files.values()]
            report.source_hash = digest_of({k: v for part in sources for k, v in part.items()})
            report.seconds = round(time.perf_counter() - start, 3)
            _finish_folder(plan, shards, partial, report, aux_files.eos_ids)
    return report


def _finished_before(
    out: Path, identity: dict[str, Any], overwrite: bool, log: Callable[[str], None]
) -> ConversionReport | None:
    """The report of an output that the same conversion has written; None if there is none.

    If a weight file of it is missing or has another size, it is converted again with ``overwrite``;
    raises UserError without. Contents are checked by ``verify`` only.
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
    log(f"{out} is complete already: nothing to do")
    return ConversionReport.from_dict(content | {"out": str(out)})


def _take_finished(
    state: ResumeState, shards: dict[str, list[OutputStep]], log: Callable[[str], None]
) -> None:
    """Take the files that an unfinished conversion has finished, checked by their checksums."""
    if not state.is_begun:
        return log("there is no unfinished conversion: starting from the first file")
    wanted = {name: contents_hash(steps) for name, steps in shards.items()}
    for name in state.take(wanted, log):
        log(f"{name} is damaged or was made with other options: writing it again")
    log(f"resuming an unfinished conversion: {len(state.files)} of {len(wanted)} files done")
    return state.clear(keep={LOCK})


def _write_weights(
    plan: ConversionPlan,
    shards: dict[str, list[OutputStep]],
    state: ResumeState,
    progress: Progress | None,
) -> None:
    """Write the weight files that are not finished, and record each in the resume state.

    In memory are the tensors of one step, and what is read ahead.
    """
    todo = {name: steps for name, steps in shards.items() if name not in state.files}
    done = plan.nbytes - sum(step.nbytes for steps in todo.values() for step in steps)
    waiting = plan.waiting_bytes
    order = _stored(plan, [step for steps in todo.values() for step in steps])
    with Reader(plan.source, order, waiting) as reader:
        read = plan.view.reading(reader)

        def arrays(steps: list[OutputStep]) -> Iterator[tuple[str, Pieces]]:
            nonlocal done
            for step in steps:
                yield from step.stream(read)
                if mx.get_cache_memory() > waiting:
                    mx.clear_cache()
                done += step.nbytes
                if progress and step.outputs:
                    progress(done, plan.nbytes, next(iter(step.outputs)))

        for name, steps in todo.items():
            with new_file(state.folder / name) as temporary:
                digest = write_file(temporary, outputs_of(steps), arrays(steps), waiting=waiting)
                size = temporary.stat().st_size
            facts = {
                "bytes": size,
                "sha256": digest,
                "holds": contents_hash(steps),
                "sources": {key: reader.digests[key] for key in _stored(plan, steps)},
            }
            state.record(name, facts)


def _stored(plan: ConversionPlan, steps: list[OutputStep]) -> list[str]:
    """Names of the stored tensors that some steps read, in order."""
    return plan.view.stored_of(name for step in steps for name in step.sources)


def contents_hash(steps: list[OutputStep]) -> str:
    """A hash of the names, shapes and dtypes of the tensors in a file of some steps."""
    lines = (f"{name} {spec.shape} {spec.dtype}\n" for name, spec in outputs_of(steps).items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _begin_report(plan: ConversionPlan, out: Path, identity: dict[str, Any]) -> ConversionReport:
    """The report, without what is known only at the end."""
    recipe, mapping, source = plan.recipe, plan.mapping, plan.source
    return ConversionReport(
        source=source.name,
        revision=source.revision,
        out=str(out),
        model_type=plan.config.model_type,
        layers=plan.config.num_hidden_layers,
        dtype=plan.dtype_name,
        parameters=mapping.parameters,
        tensors_in=len(source.tensors),
        tensors_out=len(plan.outputs),
        bytes_in=source.nbytes,
        bytes_out=plan.nbytes,
        recipe=recipe.describe() if recipe else None,
        command=plan.options.as_command(),
        quantization=plan.quantization,
        bits=plan.bits_by_family(),
        kept=starred(recipe.kept) if recipe else {},
        cast=starred(plan.casts()),
        dropped=mapping.dropped,
        notes=plan.view.notes,
        families=by_family(plan.outputs.items()),
        identity=identity_hash(identity),
    )


def _finish_folder(
    plan: ConversionPlan,
    shards: dict[str, list[OutputStep]],
    folder: Path,
    report: ConversionReport,
    eos_ids: list[int],
) -> None:
    """Write the index, the report, the model card, and at the very end config.json."""
    places = {key: name for name, steps in shards.items() for key in outputs_of(steps)}
    sums = {"total_size": report.bytes_out, "total_parameters": report.parameters}
    write_json(folder / INDEX, {"metadata": sums, "weight_map": dict(sorted(places.items()))})
    config, warnings = output_config(
        plan.view.config, plan.config, plan.dtype, plan.quantization, eos_ids
    )
    report.warnings += warnings
    write_report(folder, report)
    write_json(folder / "config.json", config | {"mlx_kda": report.provenance()})
