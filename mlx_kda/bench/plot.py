"""`bench plot`: results drawn to SVG and PNG (needs the extra `plot`)."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import new_file

# benchmark -> (across, up, what makes a panel, label of the vertical axis)
_AXES = {
    "op": ("T", "us_per_token", ("H", "dtype"), "microseconds a token"),
    "model": ("context", "tokens_per_second", ("phase",), "tokens a second"),
}


def draw(document: dict[str, Any], out: Path) -> list[Path]:
    """Draw a saved benchmark to OUT.svg and OUT.png; the paths written.

    Raises:
        UserError: matplotlib is missing, or this benchmark has no plot.
    """
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
        raise UserError(f"the results lack what bench {name} saves: {e!r}") from e
    if not document.get("complete", True):
        title += ": stopped before its end"

    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (panel, lines) in zip(axes, panels.items(), strict=True):
        for candidate, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=candidate)
        axis.set(xscale="log", yscale="log", xlabel=across, ylabel=label)
        axis.set_xscale("log", base=2)
        axis.set_title(", ".join(f"{k} {v}" for k, v in zip(panel_keys, panel, strict=True)))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title, fontsize=9)
    paths = [out.with_name(out.name + suffix) for suffix in (".svg", ".png")]
    try:
        for path in paths:
            with new_file(path) as temporary:
                figure.savefig(temporary, format=path.suffix[1:])
    except OSError as e:
        raise UserError(f"cannot write {out}: {e.strerror}") from e
    return paths
