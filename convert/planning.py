"""`convert --plan`: what a conversion takes and leaves, from configs and headers alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlx_kda.plan import FLOATS, machine, need

from .families import by_family
from .layout import Layout, Wish, bits_by_family, lay_out
from .output import free_space, partial_of, size_of, space_problem
from .report import in_words
from .run import SHARD_BYTES, into_shards
from .source import Source, open_source

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
    families: dict[str, dict[str, int]]
    bits: dict[str, dict[str, int]]
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
            f"{in_words(self.bytes_in)} -> {in_words(self.bytes_out)} in {self.files} files, "
            f"{self.bits_per_weight:.2f} bits a weight, the rest {self.dtype}",
            f"  {'family':22s} {'source':>10s} {'output':>10s}",
        ]
        for family in dict.fromkeys((*self.source_families, *self.families)):
            sizes = [
                in_words(part.get(family, {"bytes": 0})["bytes"])
                for part in (self.source_families, self.families)
            ]
            stored = "; ".join(f"{n} x {how}" for how, n in self.bits.get(family, {}).items())
            lines.append(f"  {family:22s} {sizes[0]:>10s} {sizes[1]:>10s}  {stored}".rstrip())
        lines.append(
            f"peak memory: {in_words(self.peak_bytes)} (predicted), this machine has "
            f"{in_words(self.memory_bytes)}"
        )
        if self.download_bytes:
            lines.append(f"download: {in_words(self.download_bytes)} into the hub's cache")
        lines.append(f"disk: {in_words(self.disk_needed)} needed, {in_words(self.disk_free)} free")
        lines.append("running it (predicted):")
        for context, policies in self.running.items():
            for policy, sizes in policies.items():
                lines.append(
                    f"  {context:>5s} tokens, {policy:6s} {in_words(sizes['total']):>10s}: weights "
                    f"{in_words(sizes['weights'])}, states {in_words(sizes['states'])}, latents "
                    f"{in_words(sizes['latents'])}, working set {in_words(sizes['working'])}"
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
    out = Path(out).expanduser()
    origin = open_source(source, revision, download=False)
    layout = lay_out(origin, wish)
    seen = layout if layout.steps else _without_budget(origin, wish)
    download = origin.download_bytes
    nbytes = layout.expected_bytes
    result = Plan(
        source=origin.name,
        out=str(out),
        model_type=layout.config.model_type,
        layers=_kinds(layout),
        dtype=layout.dtype_name,
        parameters=layout.mapping.parameters,
        bytes_in=origin.nbytes,
        bytes_out=nbytes,
        files=len(into_shards(seen.steps, shard_bytes)),
        source_families=by_family(origin.tensors.items()),
        families=by_family(seen.outputs.items()) if layout.steps else {},
        bits=bits_by_family(layout) if layout.steps else {},
        peak_bytes=layout.peak_bytes,
        memory_bytes=machine().total,
        download_bytes=download,
        disk_needed=max(0, nbytes - size_of(partial_of(out))),
        disk_free=free_space(out)[1],
        running=running(layout, nbytes),
        notes=list(layout.view.notes),
    )
    if target_bpw is not None:
        result.notes.append("the bits of each family are known once the errors are measured")
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


def _without_budget(origin: Source, wish: Wish) -> Layout:
    """A layout for the count of files while a byte budget is not spent: the fewest bits."""
    layout = lay_out(origin, wish)
    layout.finish()
    return layout
