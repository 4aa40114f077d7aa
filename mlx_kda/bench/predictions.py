"""What the counters' model predicts for Apple chips, by name a prediction."""

from collections.abc import Iterator
from typing import Any

from . import results

# GPU cores and clock in GHz, from public specifications and measurements.
_CHIPS = {"M1 Max": (32, 1.3), "M3 Ultra": (80, 1.4), "M4 Max": (40, 1.58)}


def _predictions(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    wanted = ("ours chunk exact", "ours chunk half", "mlx-lm gated_delta_step_vec")
    for chip, (cores, clock) in _CHIPS.items():
        for row in rows:
            if row["candidate"] in wanted:
                scale = 32 / (cores * clock * 1e3)
                yield {
                    "chip": chip,
                    "candidate": row["candidate"],
                    "low": row["overlapped"] * scale,
                    "high": row["serial"] * scale,
                }


def markdown(rows: list[dict[str, Any]]) -> str:
    """Prefill of the recurrence on Apple chips by the counters' model, named a prediction."""
    lines = list(_predictions(rows))
    if not lines:
        return ""
    table = results.markdown(
        lines,
        {"chip": "chip", "candidate": "kernel", "low": "us a token, at least", "high": "at most"},
    )
    return f"""## Predicted, not measured: the recurrence of one KDA layer on Apple chips

{table}

For 32 heads of 128 x 128, from the counters above: core-cycles of ALU and L1 fully overlapped (at
least) or not at all (at most), over cores x clock. A model of M1-class cores; it knows nothing of
memory bandwidth beyond the cores, of launches, or of how well a compiler does."""
