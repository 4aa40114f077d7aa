"""The rows of `bench profile` as one table, prefill beside decode, and its largest parts told."""

from typing import Any

from .profile import FORCING, PARTS, SUM, WHOLE
from .results import markdown, show

Row = dict[str, Any]
PHASES = ("prefill", "decode")
_STORED = "as stored ms"


def table(rows: list[Row]) -> str:
    """Parts down, milliseconds and shares of both phases across."""
    found = {(row["phase"], row["part"]): row for row in rows}
    stored = any(_STORED in row for row in rows)
    columns = {"part": "part"}
    for phase in PHASES:
        columns |= {f"{phase} ms": f"{phase}, ms", f"{phase} share": "share"}
        if stored:
            columns[f"{phase} stored"] = "ms, weights as stored"
    lines = []
    for part in (*PARTS, SUM, WHOLE, FORCING):
        line: Row = {"part": part}
        for phase in PHASES:
            row = found.get((phase, part), {})
            line[f"{phase} ms"], line[f"{phase} stored"] = row.get("ms"), row.get(_STORED)
            share = row.get("share")
            line[f"{phase} share"] = None if share is None else f"{share:.1%}"
        if len([value for value in line.values() if value is not None]) > 1:
            lines.append(line)
    return markdown(lines, columns)


def largest(rows: list[Row]) -> str:
    """The two largest parts of each phase in a sentence."""
    return " ".join(_sentence(phase, rows) for phase in PHASES)


def _sentence(phase: str, rows: list[Row]) -> str:
    parts = [row for row in rows if row["phase"] == phase and row["part"] in PARTS]
    first = sorted(parts, key=lambda row: -row["ms"])[:2]
    told = " and ".join(f"{row['part']} ({row['share']:.0%})" for row in first)
    sentence = f"The largest parts of a {'decode step' if phase == 'decode' else phase}: {told}"
    gains = [row for row in first if _STORED in row and row["ms"] < row[_STORED]]
    if gains:
        before = " and ".join(
            f"{row['part']} from {show(row[_STORED])} to {show(row['ms'])} ms" for row in gains
        )
        sentence += f"; the layout of weights took {before}"
    return sentence + "."
