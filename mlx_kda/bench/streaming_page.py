"""docs/conversion.md, written from what `streaming` measured."""

from collections.abc import Callable
from typing import Any

from ..format import size
from .streaming_tasks import KILL_SHARD_BYTES, SHARD_BYTES

LIMIT = 1.3  # times the seconds of a plain copy and quantisation


def broken(rows: list[dict[str, Any]]) -> list[str]:
    """The promises that were not kept, in words; [] where all were."""
    found = []
    for row in rows:
        name = row["recipe"]
        if row["peak"] > row["bound"]:
            found.append(f"{name}: {size(row['peak'])} at the peak, bound {size(row['bound'])}")
        if row["ratio"] > LIMIT:
            found.append(f"{name}: {row['ratio']:.2f} times a plain copy, bound {LIMIT}")
        if not row["same_bits"]:
            found.append(f"{name}: the tensors are not those of the model converted at once")
        if not row["same_files"]:
            found.append(f"{name}: the files after kills are not those of a run left alone")
    return found


def page(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The page of results."""
    facts = rows[0]
    yes = {True: "yes", False: "NO"}
    lines = [
        "# Conversion, measured",
        "",
        f"Written by `{about['command']}` on {about['date']}, commit {about['commit']}.",
        f"Machine: {about['chip']}, {about['cores']} cores, {about['memory_gb']} GB, "
        f"{about['system']}, MLX on its {about['device']}. It is shared and its disk is slow, so "
        "times are quoted as ratios of runs that took turns. Not an Apple GPU.",
        "",
        f"Source: a synthetic checkpoint of {size(facts['source_bytes'])}, "
        f"{facts['layers']} layers, {facts['experts']} experts, {facts['source_files']} files; "
        f"largest layer {size(facts['layer_bytes'])}; output files of {size(SHARD_BYTES)}, for "
        f"the kills of {size(KILL_SHARD_BYTES)}.",
        "",
        "| | " + " | ".join(row["recipe"] for row in rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    table: list[tuple[str, Callable[[dict], str]]] = [
        ("output", lambda r: size(r["output_bytes"])),
        ("peak memory (system's count)", lambda r: size(r["peak"])),
        ("of that, an idle process", lambda r: size(r["idle"])),
        ("bound: a layer + a file + 1 GB", lambda r: size(r["bound"])),
        ("peak with the model in memory", lambda r: size(r["at_once_peak"])),
        ("seconds, median", lambda r: f"{r['seconds']:.1f}"),
        ("plain copy and quantisation, seconds", lambda r: f"{r['plain_seconds']:.1f}"),
        ("seconds of all processors, the same", lambda r: f"{r['cpu']:.1f}, {r['plain_cpu']:.1f}"),
        (f"ratio (bound {LIMIT})", lambda r: f"{r['ratio']:.2f}"),
        ("ratios of the runs", lambda r: ", ".join(f"{x:.2f}" for x in r["ratios"])),
        ("tensors bit for bit those of all at once", lambda r: yes[r["same_bits"]]),
        ("kill -9 at random moments", lambda r: str(r["kills"])),
        ("files finished at each", lambda r: ", ".join(map(str, r["finished"]))),
        ("files after --resume identical", lambda r: yes[r["same_files"]]),
    ]
    lines += [f"| {name} | " + " | ".join(map(show, rows)) + " |" for name, show in table]
    lines += [
        "",
        "`plain copy and quantisation` reads every file and writes it again, or its matrices",
        "quantised one by one as they are stored: no stacking of experts, no check for NaN, no",
        "checksums. A conversion has all of these, and the SHA-256 of source and output.",
        "",
    ]
    return "\n".join(lines)
