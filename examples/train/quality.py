"""Write docs/quality.md from quality.json: what quantisation costs on the trained checkpoint.

    mlx-kda bench quality ../tiny-kimi-linear --text held_out.txt --out .
    python quality.py

The first command measures and writes quality.json beside this file, the second the page.
"""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "quality.md"
Row = dict[str, Any]

HEAD = """\
# What quantisation costs

Measured on [the trained checkpoint](../examples/tiny-kimi-linear/README.md) with its held-out text
(the Book of Ruth, {tokens:,} predicted tokens in one stream). Written by
`examples/train/quality.py` from `examples/train/quality.json`, which this command made
({date}, {device}, commit {commit}):

    {command}

Activations are {computed_in} in every row, so the rows differ by their weights alone. Bits a weight
are stored bits, scales included. Divergence is how far the model's predictions move from those of
the source: `sum_i p_i ln(p_i / q_i)`, nats a token, ± the standard error over the tokens. It tells
recipes apart on far less text than perplexity does.
"""

GATES = """\
## The gate path: kept, as by default, or quantised too

The default recipe keeps `f_a`, `f_b`, `g_a`, `g_b` and `b` (decay, output gate and write strength)
at 16 bits. The same recipe with them quantised as well differs by this, ± the standard error of the
difference, token by token:

"""

SIZE = """\
## The same bytes, spent otherwise

Three models of one size: 4 bits by the default recipe; bits chosen weight by weight
(`--target-bpw`); the same with the gate path in 4 bits and its bytes given to other weights.

"""

LIMITS = """\
## What this does not say

- It is one model of 11 million parameters and one text. Quantising the gate path saves
  {saved:.1%} of this model's bytes at 4 bits, which the table above spends better. In Kimi Linear
  48B it is 34 million parameters of 48 billion (from its shapes; it was never loaded), 0.3 % of the
  bytes at 4 bits, and there is as good as nothing to gain.
- Small models lose more to few bits than large ones: 3 and 2 bits say how recipes compare, and are
  of no use to run this model.
"""


def table(headings: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def with_error(row: Row, name: str) -> str:
    """A mean and its standard error; the sign matters in a difference."""
    sign = "+" if name.startswith("gates") else ""
    return f"{row[name]:{sign}.4f} ± {row[f'{name}_error']:.4f}"


def verdict(row: Row) -> str:
    """What a difference in divergence shows: two standard errors are asked for."""
    rise, error = row["gates_divergence"], row["gates_divergence_error"]
    if abs(rise) < 2 * error:
        return "no difference shown"
    return "keeping it is better" if rise > 0 else "keeping it is worse"


def recipes(rows: list[Row]) -> str:
    """Recipes, one a line."""
    headings = ["weights", "bits a weight", "MB", "bits a byte", "perplexity a token", "divergence"]
    return table(
        headings,
        [
            [
                row["words"],
                f"{row['bits_per_weight']:.2f}",
                f"{row['mb']:.1f}",
                f"{row['bits_per_byte']:.3f}",
                f"{row['perplexity']:,.1f}",
                "0" if row["recipe"] == "source" else with_error(row, "divergence"),
            ]
            for row in rows
        ],
    )


def gates(pairs: list[tuple[Row, Row]]) -> str:
    """Pairs of recipes with the gate path kept and quantised."""
    headings = [
        "weights",
        "bits a weight, kept / quantised",
        "perplexity, kept / quantised",
        "nats a token",
        "divergence",
        "by divergence",
    ]
    return table(
        headings,
        [
            [
                kept["words"],
                f"{kept['bits_per_weight']:.2f} / {row['bits_per_weight']:.2f}",
                f"{kept['perplexity']:,.1f} / {row['perplexity']:,.1f}",
                with_error(row, "gates_nats"),
                with_error(row, "gates_divergence"),
                verdict(row),
            ]
            for kept, row in pairs
        ],
    )


def page(record: dict[str, Any]) -> str:
    """The whole page."""
    rows, about = record["rows"], record["machine"]
    head = HEAD.format(
        tokens=rows[0]["tokens"],
        computed_in=rows[0]["computed_in"],
        date=about["date"].split()[0],
        device=about["device"],
        commit=about["commit"] or "unknown",
        command=about["command"],
    )
    found = {row["recipe"]: row for row in rows}
    plain = [row for name, row in found.items() if not set("+=") & set(name)]
    plain.sort(key=lambda row: -row["bits_per_weight"])
    pairs = [
        (found[name.removesuffix("+gates")], row)
        for name, row in found.items()
        if name.endswith("+gates")
    ]
    sized = [found[name] for name in ("q4", "q4=size", "q4+gates=size")]
    saved = 1 - found["q4+gates"]["mb"] / found["q4"]["mb"]
    parts = [head, recipes(plain), "\n" + GATES + gates(pairs), "\n" + SIZE + recipes(sized)]
    return "\n".join([*parts, "\n" + LIMITS.format(saved=saved)])


def main() -> None:
    """Write the page under a temporary name first."""
    record = json.loads((HERE / "quality.json").read_text(encoding="utf-8"))
    PAGE.parent.mkdir(exist_ok=True)
    temporary = PAGE.with_suffix(".tmp")
    temporary.write_text(page(record), encoding="utf-8")
    temporary.rename(PAGE)


if __name__ == "__main__":
    main()
