"""What headers alone tell: ``inspect`` describes a checkpoint, ``plan`` a conversion of it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UserError
from ..format import size
from ..memory_plan import FLOATS, machine, need
from ..models import map_checkpoint
from ..models.tensor_roles import by_family, tensor_family
from ..weights.source import open_source
from .bit_budget import BitBudget
from .conversion_plan import SHARD_BYTES, ConversionPlan, plan_conversion
from .output_dir import free_space, output_path, partial_of, size_of, space_problem
from .recipe import ConvertOptions

CONTEXTS = {"8K": 8 * 1024, "128K": 128 * 1024, "1M": 1024 * 1024}


@dataclass
class Inspection:
    """Facts about a checkpoint; ``problem`` is why it cannot be converted."""

    source: str
    format: str  # "mlx" or "huggingface"
    model_type: str
    layers: int
    layer_types: dict[str, int]
    context: int
    parameters: int
    tensors: int
    files: int
    nbytes: int
    dtypes: dict[str, int]  # dtype -> bytes
    families: dict[str, dict[str, int]]
    quantization: dict[str, Any] | None
    problem: str | None

    def as_dict(self) -> dict[str, Any]:
        """The facts for JSON."""
        return asdict(self)


def inspect(folder: str | Path) -> Inspection:
    """Describe a checkpoint folder from its config and headers; no tensor is read.

    Raises CheckpointError or UserError where the folder is no checkpoint or its files are damaged.
    An undamaged checkpoint that cannot be converted is described, with ``problem`` set.
    """
    if not Path(folder).expanduser().is_dir():
        raise UserError(f"{folder}: no such folder")
    origin = open_source(folder)
    raw, tensors = origin.config, origin.tensors
    dtypes: Counter[str] = Counter()
    for stored in tensors.values():
        dtypes[str(stored.dtype).removeprefix("mlx.core.")] += stored.nbytes
    config, mapping, problem = None, None, None
    stated = raw.get("num_hidden_layers")
    try:
        config, mapping = map_checkpoint(raw, tensors)
    except CheckpointError as error:
        problem = str(error)
    is_mlx = any(name.endswith((".conv.weight", ".scales", ".embed_q.weight")) for name in tensors)
    return Inspection(
        source=str(folder),
        format="mlx" if is_mlx else "huggingface",
        model_type=str(raw.get("model_type")),
        layers=config.num_hidden_layers if config else stated if isinstance(stated, int) else 0,
        layer_types=dict(Counter(config.layer_types)) if config else {},
        context=config.model_max_length if config else 0,
        parameters=mapping.parameters if mapping else sum(t.size for t in tensors.values()),
        tensors=len(tensors),
        files=len({stored.file for stored in tensors.values()}),
        nbytes=origin.nbytes,
        dtypes=dict(dtypes.most_common()),
        families=by_family(tensors.items()),
        quantization=raw.get("quantization"),
        problem=problem,
    )


@dataclass
class Plan:
    """What ``convert`` would do; ``problems`` says what does not fit."""

    source: str
    out: str
    model_type: str
    layers: dict[str, int]  # kind -> how many
    dtype: str
    parameters: int
    bytes_in: int
    bytes_out: int
    files: int
    source_families: dict[str, dict[str, int]]
    families: dict[str, dict[str, int]]  # those in `open` at the fewest bits
    bits: dict[str, dict[str, int]]
    open: list[str]  # families whose bits a byte budget chooses, once their errors are measured
    peak_bytes: int
    memory_bytes: int
    download_bytes: int
    disk_needed: int
    disk_free: int
    # context -> policy -> weights, states, latents, working set and their sum
    running: dict[str, dict[str, dict[str, int]]]
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits for each parameter of the model."""
        return 8 * self.bytes_out / self.parameters if self.parameters else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON."""
        return asdict(self) | {"bits_per_weight": self.bits_per_weight}

    def lines(self) -> list[str]:
        """The plan to print."""
        kinds = ", ".join(f"{count} {kind.upper()}" for kind, count in self.layers.items())
        lines = [
            f"{self.source} -> {self.out} (a plan: nothing is written)",
            f"{self.model_type}, {sum(self.layers.values())} layers: {kinds}; "
            f"{self.parameters / 1e6:,.1f} M parameters",
            f"{size(self.bytes_in)} -> {size(self.bytes_out)} in "
            f"{'about ' if self.open else ''}{self.files} file{'' if self.files == 1 else 's'}, "
            f"{self.bits_per_weight:.2f} bits per weight, the rest {self.dtype}",
            f"  {'family':22s} {'source':>10s} {'output':>10s}",
        ]
        for family in dict.fromkeys((*self.source_families, *self.families)):
            given, made = (
                size(part.get(family, {"bytes": 0})["bytes"])
                for part in (self.source_families, self.families)
            )
            stored = "; ".join(f"{n} x {how}" for how, n in self.bits.get(family, {}).items())
            if family in self.open:
                made, stored = f">= {made}", "bits chosen by the measured errors"
            lines.append(f"  {family:22s} {given:>10s} {made:>10s}  {stored}".rstrip())
        lines.append(
            f"peak memory: {size(self.peak_bytes)} (predicted), this machine has "
            f"{size(self.memory_bytes)}"
        )
        if self.download_bytes:
            lines.append(f"download: {size(self.download_bytes)} into the hub's cache")
        lines.append(f"disk: {size(self.disk_needed)} needed, {size(self.disk_free)} free")
        lines.append("running it (predicted):")
        for context, policies in self.running.items():
            for policy, sizes in policies.items():
                lines.append(
                    f"  {context:>5s} tokens, {policy:6s} {size(sizes['total']):>10s}: weights "
                    f"{size(sizes['weights'])}, states {size(sizes['states'])}, latents "
                    f"{size(sizes['latents'])}, working set {size(sizes['working'])}"
                )
        return lines + self.notes


def plan(
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
    revision: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Plan:
    """Plan a conversion; the arguments are those of ``convert``, and no tensor is read.

    Of a hub id the small files are downloaded, and of its weights only the headers.

    Raises UserError or CheckpointError where ``convert`` would refuse the source or the options.
    What does not fit the memory or the disk is in ``problems``.
    """
    options = ConvertOptions(
        dtype, q_bits, q_group_size, q_mode, tuple(q_rules), target_bpw, dequantize
    )
    out = output_path(out)
    origin = open_source(source, revision, download=False)
    conversion = plan_conversion(origin, options)
    nbytes, chosen = conversion.expected_bytes, []
    if conversion.has_budget:
        budget = BitBudget(conversion)
        budget.apply_fewest()
        chosen = sorted({tensor_family(f"{path}.weight") for path in budget.specs})
    bits = conversion.bits_by_family()
    files = -(-nbytes // shard_bytes) if chosen else len(conversion.shards(shard_bytes))
    disk_needed = max(0, nbytes - size_of(partial_of(out)))
    problems = (
        space_problem(out, disk_needed, origin.folder, origin.download_bytes),
        conversion.memory_problem(),
    )
    return Plan(
        source=origin.name,
        out=str(out),
        model_type=conversion.config.model_type,
        layers=dict(Counter(conversion.config.layer_types)),
        dtype=conversion.dtype_name,
        parameters=conversion.mapping.parameters,
        bytes_in=origin.nbytes,
        bytes_out=nbytes,
        files=files,
        source_families=by_family(origin.tensors.items()),
        families=by_family(conversion.outputs.items()),
        bits={family: found for family, found in bits.items() if family not in chosen},
        open=chosen,
        peak_bytes=conversion.peak_bytes,
        memory_bytes=machine().total,
        download_bytes=origin.download_bytes,
        disk_needed=disk_needed,
        disk_free=free_space(out)[1],
        running=_running(conversion, nbytes),
        notes=list(conversion.view.notes),
        problems=[problem for problem in problems if problem],
    )


def _running(plan: ConversionPlan, nbytes: int) -> dict[str, dict[str, dict[str, int]]]:
    """What the model takes to run at some lengths, with exact latents and in 8 bits."""
    dtype = FLOATS[plan.dtype_name]
    result: dict[str, dict[str, dict[str, int]]] = {}
    for word, context in CONTEXTS.items():
        for policy in ("exact", "int8"):
            one = need(plan.config, nbytes, dtype, context, policy)
            sizes = {k: getattr(one, k) for k in ("weights", "states", "latents", "working")}
            result.setdefault(word, {})[policy] = sizes | {"total": one.total}
    return result
