"""`convert --plan`: what a conversion takes and leaves, from configs and headers alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..format import size
from ..models.tensor_roles import by_family, tensor_family
from ..plan import FLOATS, machine, need
from ..weights.quantization import Quantization
from ..weights.source import CheckpointSource, open_source
from .budget import bytes_to_spend, fewest_bits
from .layout import Layout, Wish, bits_by_family, lay_out
from .output import free_space, named, partial_of, size_of, space_problem
from .shards import SHARD_BYTES, into_shards

CONTEXTS = {"8K": 8 * 1024, "128K": 128 * 1024, "1M": 1024 * 1024}


@dataclass
class Plan:
    """What `mlx-kda convert` would do; `problems` says what cannot fit."""

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
    families: dict[str, dict[str, int]]  # of those in `open`, what they take at the fewest bits
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
        """The plan as JSON takes it."""
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
            f"{self.bits_per_weight:.2f} bits a weight, the rest {self.dtype}",
            f"  {'family':22s} {'source':>10s} {'output':>10s}",
        ]
        for family in dict.fromkeys((*self.source_families, *self.families)):
            sizes = [
                size(part.get(family, {"bytes": 0})["bytes"])
                for part in (self.source_families, self.families)
            ]
            stored = "; ".join(f"{n} x {how}" for how, n in self.bits.get(family, {}).items())
            if family in self.open:
                sizes[1], stored = f">= {sizes[1]}", "bits chosen by the measured errors"
            lines.append(f"  {family:22s} {sizes[0]:>10s} {sizes[1]:>10s}  {stored}".rstrip())
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
    """Plan a conversion; the arguments are those of `convert`, and no tensor is read.

    Of a hub id the small files are fetched, and of its weights the headers, by range requests.

    Raises UserError or CheckpointError where `convert` would refuse the source or the wish. What
    does not fit the memory or the disk is in `problems`.
    """
    wish = Wish(dtype, q_bits, q_group_size, q_mode, tuple(q_rules), target_bpw, dequantize)
    out = named(out)
    origin = open_source(source, revision, download=False)
    layout = lay_out(origin, wish)
    seen, free = (layout, {}) if layout.steps else _fewest_bits(origin, wish)
    download = origin.download_bytes
    nbytes = layout.expected_bytes
    bits, chosen = bits_by_family(seen), sorted({tensor_family(f"{path}.weight") for path in free})
    result = Plan(
        source=origin.name,
        out=str(out),
        model_type=layout.config.model_type,
        layers=_kinds(layout),
        dtype=layout.dtype_name,
        parameters=layout.mapping.parameters,
        bytes_in=origin.nbytes,
        bytes_out=nbytes,
        files=-(-nbytes // shard_bytes) if free else len(into_shards(seen.steps, shard_bytes)),
        source_families=by_family(origin.tensors.items()),
        families=by_family(seen.outputs.items()),
        bits={family: found for family, found in bits.items() if family not in chosen},
        open=chosen,
        peak_bytes=layout.peak_bytes,
        memory_bytes=machine().total,
        download_bytes=download,
        disk_needed=max(0, nbytes - size_of(partial_of(out))),
        disk_free=free_space(out)[1],
        running=running(layout, nbytes),
        notes=list(layout.view.notes),
    )
    if problem := space_problem(out, result.disk_needed, origin.folder, download):
        result.problems.append(problem)
    if problem := layout.memory_problem():
        result.problems.append(problem)
    return result


def running(layout: Layout, nbytes: int) -> dict[str, dict[str, dict[str, int]]]:
    """What the model will take to run at some lengths, with latents kept exactly and in 8 bits."""
    dtype = FLOATS[layout.dtype_name]
    result: dict[str, dict[str, dict[str, int]]] = {}
    for word, context in CONTEXTS.items():
        for policy in ("exact", "int8"):
            one = need(layout.config, nbytes, dtype, context, policy)
            sizes = {k: getattr(one, k) for k in ("weights", "states", "latents", "working")}
            result.setdefault(word, {})[policy] = sizes | {"total": one.total}
    return result


def _kinds(layout: Layout) -> dict[str, int]:
    kinds = list(layout.config.layer_types)
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def _fewest_bits(origin: CheckpointSource, wish: Wish) -> tuple[Layout, dict[str, Quantization]]:
    """A layout with the fewest bits that a byte budget may choose, and what it chooses for.

    Raises UserError where even they pass the budget.
    """
    layout = lay_out(origin, wish)
    bytes_to_spend(layout)
    fewest = fewest_bits(layout)
    layout.recipe.chosen = dict(fewest)
    layout.finish()
    return layout, fewest
