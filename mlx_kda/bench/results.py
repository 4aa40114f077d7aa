"""Results on disk: CSV and JSON with the machine beside them, and Markdown tables from either."""

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import try_lock, write_text
from .timing import STEADY

Row = dict[str, Any]


def save(folder: Path, name: str, machine: Row, rows: Sequence[Row]) -> tuple[Path, Path]:
    """Write NAME.json (machine and rows) and NAME.csv (rows), each under a temporary name first."""
    paths = folder / f"{name}.json", folder / f"{name}.csv"
    _write(paths[0], _json({"benchmark": name, "machine": machine, "rows": list(rows)}))
    _write(paths[1], _csv(rows))
    return paths


class Saving:
    """Rows in NAME.partial.json as they come: a run that is stopped loses none.

    Args:
        folder, name: where, and of which benchmark.
        describe: what `machine.describe` says, asked for at the first row.

    Raises:
        UserError: the folder cannot be written, another run writes the same there, or it holds the
            rows of a run that was stopped.
    """

    def __init__(self, folder: Path, name: str, describe: Callable[[], Row]):
        self.folder, self.name, self.rows = folder, name, []
        self.path = folder / f"{name}.partial.json"
        self._describe = cache(describe)
        _make(folder)
        if not os.access(folder, os.W_OK):
            raise UserError(f"the folder {folder} cannot be written")
        place = folder / f".{name}.lock"
        try:
            lock = try_lock(place)
        except OSError as e:
            raise UserError(f"cannot write {place}: {e.strerror}") from e
        if lock is None:
            raise UserError(
                f"another run of bench {name} writes to {folder}: wait for it, or name another"
            )
        self._lock = lock
        if self.path.exists():
            self.close()
            raise UserError(f"{self.path} holds the rows of a run that was stopped: move it first")

    def add(self, row: Row) -> None:
        """Keep one more row."""
        self.rows.append(row)
        document = {"benchmark": self.name, "machine": self._describe(), "rows": self.rows}
        _write(self.path, _json({**document, "complete": False}))

    def finish(self) -> tuple[Path, Path]:
        """`save` all of them and remove the partial file."""
        paths = save(self.folder, self.name, self._describe(), self.rows)
        self.path.unlink(missing_ok=True)
        self.close()
        return paths

    def close(self) -> None:
        """Leave the folder to other runs; rows that were not finished stay."""
        self._lock.release()


def _write(path: Path, text: str) -> None:
    _make(path.parent)
    try:
        write_text(path, text)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}") from e


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot make the folder {folder}: {e.strerror}") from e


def load(path: Path) -> dict[str, Any]:
    """A document that `save` wrote, or `Saving` of a run that was stopped ("complete" is False)."""
    try:
        document = json.loads(path.read_text())
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is not a benchmark's JSON: {e}") from e
    for key, kind in (("benchmark", str), ("machine", dict), ("rows", list)):
        if not isinstance(document, dict) or not isinstance(document.get(key), kind):
            raise UserError(
                f"{path} is not a benchmark's JSON: {key} is missing or no {kind.__name__}"
            )
    if not document["rows"] or not all(isinstance(row, dict) for row in document["rows"]):
        raise UserError(f"{path} holds no rows of a benchmark")
    return document


def steady(row: Row) -> bool:
    """Whether a row's samples, if it has any, lie close enough together."""
    return (row.get("spread") or 0) <= STEADY


def noise(rows: Sequence[Row]) -> str:
    """How many rows spread over more than they may, in words; "" for none."""
    noisy = sum(not steady(row) for row in rows)
    return f"{noisy} of {len(rows)} rows spread over more than 5 % of their median" if noisy else ""


def markdown(rows: Sequence[Row], columns: dict[str, str]) -> str:
    """A table of some columns: key -> heading; numbers to three digits."""
    lines = [
        "| " + " | ".join(columns.values()) + " |",
        "|" + "---|" * len(columns),
    ]
    lines += ["| " + " | ".join(show(row.get(key)) for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def show(value: Any) -> str:
    """A number as a person reads it: three digits, thousands apart."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
            return f"{value:.1e}"
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def _json(document: Row) -> str:
    return json.dumps(document, indent=1) + "\n"


def _csv(rows: Iterable[Row]) -> str:
    rows = list(rows)
    text = io.StringIO()
    names = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
