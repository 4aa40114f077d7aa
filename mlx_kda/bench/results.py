"""Results on disk and on a screen: JSON and CSV with the machine beside them, tables, plots."""

import csv
import io
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import new_file, try_lock, write_text
from .timing import STEADY

Row = dict[str, Any]
Rows = Iterator[Row]


@dataclass(frozen=True)
class Benchmark:
    """How the rows of one benchmark are named and shown.

    Attributes:
        name: of its files.
        title: of its section on a page.
        columns: key of a row -> heading, in the order of a table.
        note: what a reader of the table must know.
    """

    name: str
    title: str
    columns: dict[str, str]
    note: str = ""


def columns(names: str, **headings: str) -> dict[str, str]:
    """Key -> heading, which is the key itself where none is given."""
    return {name: headings.get(name, name) for name in names.split()}


def save(folder: Path, name: str, machine: Row, rows: Sequence[Row]) -> tuple[Path, Path]:
    """Write NAME.json (machine and rows) and NAME.csv (rows); each appears when it is complete."""
    paths = folder / f"{name}.json", folder / f"{name}.csv"
    _write(paths[0], _json({"benchmark": name, "machine": machine, "rows": list(rows)}))
    text = io.StringIO()
    keys = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _write(paths[1], text.getvalue())
    return paths


class Saving:
    """Rows written to NAME.partial.json as they come, so that an interrupted run loses none.

    Args:
        folder, name: where, and of which benchmark.
        describe: returns what `machine.describe` does; called at the first row.

    Raises:
        UserError: the folder cannot be written, another run is writing the same benchmark there,
            or it holds the rows of an interrupted run.
    """

    def __init__(self, folder: Path, name: str, describe: Callable[[], Row]):
        self.folder, self.name = folder, name
        self.rows: list[Row] = []
        self.path = folder / f"{name}.partial.json"
        self._describe = cache(describe)
        _make(folder)
        if not os.access(folder, os.W_OK):
            raise UserError(f"the folder {folder} is not writable")
        place = folder / f".{name}.lock"
        try:
            lock = try_lock(place)
        except OSError as e:
            raise UserError(f"cannot write {place}: {e.strerror}") from e
        if lock is None:
            raise UserError(
                f"another run of {name} is writing to {folder}: wait for it, or name another folder"
            )
        self._lock = lock
        if self.path.exists():
            self.close()
            raise UserError(f"{self.path} holds the rows of an interrupted run: move it first")

    def add(self, row: Row) -> None:
        """Save one more row."""
        self.rows.append(row)
        document = {"benchmark": self.name, "machine": self._describe(), "rows": self.rows}
        _write(self.path, _json({**document, "complete": False}))

    def finish(self) -> tuple[Path, Path]:
        """`save` all rows and remove the partial file."""
        paths = save(self.folder, self.name, self._describe(), self.rows)
        self.path.unlink(missing_ok=True)
        self.close()
        return paths

    def close(self) -> None:
        """Release the folder; rows of a run that did not finish stay in the partial file."""
        self._lock.release()


def load(path: Path) -> dict[str, Any]:
    """A document of `save`, or of `Saving` for an interrupted run ("complete" is False).

    Raises:
        UserError: the file cannot be read, or is not one of these.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is not a benchmark's JSON: {e}") from e
    for key, kind in (("benchmark", str), ("machine", dict), ("rows", list)):
        if not isinstance(document, dict) or not isinstance(document.get(key), kind):
            raise UserError(
                f"{path} is not a benchmark's JSON: {key} is missing or not a {kind.__name__}"
            )
    if not document["rows"] or not all(isinstance(row, dict) for row in document["rows"]):
        raise UserError(f"{path} holds no rows of a benchmark")
    return document


def steady(row: Row) -> bool:
    """Whether a row's samples, if it has any, are close enough together."""
    return (row.get("spread") or 0) <= STEADY


def noise(rows: Sequence[Row]) -> str:
    """How many rows are noisier than `timing.STEADY`, in words; "" for none."""
    noisy = sum(not steady(row) for row in rows)
    if not noisy:
        return ""
    return f"{noisy} of {len(rows)} rows have a spread of more than 5 % of their median"


def markdown(rows: Sequence[Row], columns: dict[Any, str]) -> str:
    """A Markdown table of some columns (key -> heading), with numbers to three digits."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(show(row.get(key)) for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def show(value: Any) -> str:
    """A value as a person reads it: three digits, thousands separated."""
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


# benchmark -> (across, up, what makes a panel, label of the vertical axis)
_AXES = {
    "op": ("T", "us_per_token", ("H", "dtype"), "microseconds per token"),
    "model": ("context", "tokens_per_second", ("phase",), "tokens per second"),
}


def plot(path: Path) -> list[Path]:
    """Draw the saved rows of "op" or "model" as SVG and PNG beside their JSON; the paths written.

    Raises:
        UserError: matplotlib is missing, or the file is not a result of one of these.
    """
    document = load(path)
    name = document["benchmark"]
    if name not in _AXES:
        raise UserError(f"no plot for benchmark {name!r}; there is one for {', '.join(_AXES)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UserError("plots need matplotlib: pip install 'mlx-kda[plot]'") from e

    across, up, panel_keys, label = _AXES[name]
    panels: dict[tuple, dict[str, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    try:
        for row in document["rows"]:
            panel = tuple(row[key] for key in panel_keys)
            panels[panel][row["candidate"]].append((float(row[across]), float(row[up])))
        title = ", ".join(document["machine"][key] for key in ("chip", "device", "date"))
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path} lacks what the benchmark {name} saves: {e!r}") from e
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (panel, lines) in zip(axes, panels.items(), strict=True):
        for candidate, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=candidate)
        axis.set(yscale="log", xlabel=across, ylabel=label)
        axis.set_xscale("log", base=2)
        axis.set_title(", ".join(f"{k} {v}" for k, v in zip(panel_keys, panel, strict=True)))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title, fontsize=9)
    paths = [path.with_suffix(suffix) for suffix in (".svg", ".png")]
    for picture in paths:
        with new_file(picture) as temporary:
            figure.savefig(temporary, format=picture.suffix[1:])
    return paths


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


def _json(document: Row) -> str:
    return json.dumps(document, indent=1) + "\n"
