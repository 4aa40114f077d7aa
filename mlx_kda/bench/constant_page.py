"""docs/constant-memory.md, written from what `constant` measured, and what counts as growth."""

from collections.abc import Sequence
from typing import Any

from . import results

QUESTION = "What is an anchor?"
# How much more a number may be at the end than at first. Resident memory holds Python's list of the
# ids read (8 bytes each) and what the allocators keep.
ROOM_MB = {"active_mb": 0.1, "mlx_peak_mb": 1.0, "resident_mb": 4.0}
COLUMNS = {
    "tokens": "tokens",
    "cache_bytes": "cache bytes",
    "arrays": "live arrays",
    "active_mb": "MLX active MB",
    "mlx_peak_mb": "MLX peak MB",
    "resident_mb": "resident MB",
    "peak_mb": "highest resident MB",
    "tokens_per_second": "tokens/s",
}


def growth(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What grew after the first row, in words; [] where nothing did."""
    first, last = rows[0], rows[-1]
    found = [
        f"{COLUMNS[key]}: {first[key]:,} -> {row[key]:,}"
        for key in ("cache_bytes", "arrays")
        for row in rows
        if row[key] != first[key]
    ]
    for key, room in ROOM_MB.items():
        if last[key] > first[key] + room:
            found.append(f"{COLUMNS[key]}: {first[key]:.1f} -> {last[key]:.1f}")
    return found


def page(about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The page; the last row names the model and has its answer."""
    grew, first, last = growth(rows), rows[0], rows[-1]
    rooms = ", ".join(
        f"{COLUMNS[key].removesuffix(' MB')} by {room:g} MB" for key, room in ROOM_MB.items()
    )
    packages = ", ".join(f"{k} {v}" for k, v in about["packages"].items())
    return "\n".join(
        [
            "# Constant memory, measured",
            "",
            f"`{last['model']}` reads {last['tokens']:,} tokens in one context. Every layer is",
            "KDA, so its cache is a state and three windows a layer, however long the text is.",
            "",
            f"- command: `{about['command']}`",
            f"- {about['date']}, commit {about['commit']}, {packages}",
            f"- {about['chip']}, {about['device']}, {about['cores']} cores, {about['system']}",
            "",
            results.markdown(rows, COLUMNS),
            "",
            "Bounds: the cache's bytes and the number of live arrays are the same in every row.",
            f"Memory in the last row is above that in the first at most by: {rooms}.",
            f"Out of these bounds: {'; '.join(grew) if grew else 'nothing'}.",
            "",
            f"Resident memory changed by {last['resident_mb'] - first['resident_mb']:+.1f} MB;",
            f"Python's list of the ids took {8e-6 * (last['tokens'] - first['tokens']):.1f} MB",
            "of that, the rest is not accounted for (the arrays and MLX's memory are, above).",
            "MLX's peak is that since the row before. The machine may have had other work, so the",
            "speeds are no measurement.",
            "",
            f"Asked in the same context after all of it, {QUESTION!r}, the model answers (greedy):",
            "",
            f"> {last['answer']}",
            "",
        ]
    )
