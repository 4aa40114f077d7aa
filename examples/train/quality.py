"""Write docs/quality.md: what quantisation costs on the two trained checkpoints.

    python ../../benchmarks/quality.py ../tiny-kimi-linear --text held_out.txt --out .
    python ../../benchmarks/quality.py ../tiny-fla-kda --text held_out.txt --recipes ... --out kda
    python quality.py

The first two commands measure: the quality.json of the first is this folder's, that of the second
is quality-kda.json here. The third writes the page.
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

Activations are {computed_in} in every row, so the rows differ by their weights alone. Bits per
weight are stored bits, scales included. Divergence is how far the model's predictions move from
those of the source: `sum_i p_i ln(p_i / q_i)`, nats per token, ± the standard error over the
tokens. It tells recipes apart on far less text than perplexity does.
"""

GATES = """\
## The gate path: kept, as by default, or quantised too

The default recipe keeps `f_a`, `f_b`, `g_a`, `g_b` and `b` (decay, output gate and write strength)
at 16 bits. The same recipe with them quantised as well differs by this, ± the standard error of the
difference, token by token:

"""

DECISION = """\
At the same bits keeping them is better, at the same bytes it is not: in 8 bits they cost nothing
that can be measured here, and take {eight:.1%} of this model's bytes less at 4 bits. The default
keeps them all the same. It is made for Kimi Linear 48B, where they are 34 million parameters of 48
billion (from its shapes; it was never loaded): at 4 bits keeping them adds 0.2 % to the bytes, and
what their errors do along a text far longer than this one was not measured on a large model. Where
these bytes count, `--target-bpw` chooses for the gate path as for the rest, and
`--q-rule 'self_attn.f_a_proj=8,64'` (and so on) does it by hand.
"""

FAMILIES = """\
## What the predictions respond to

One family of weights quantised, all others as in the source. The relative error is
`sum |W - Q(W)|^2 / |W|^2` over the family's matrices.

"""

ORDER = """\
Two things can be read off. The divergence of a family is about in proportion to its relative error
(4 and 3 bits agree within a factor of {within:.1f}), and those of the families that the default
recipe quantises add up to {added:.2f} at 4 bits, where all of them together cost {together:.2f}.
And the proportion, the last column, differs by a factor of {spread:.0f} between families: bytes
spent by relative error alone would go to the wrong weights, away from embedding and head. So
`--target-bpw` weighs the error of a matrix by its role and place; those weights are in
[convert/bit_budget.py](../convert/bit_budget.py), rounded from the same measurement of every
single matrix at 3 bits.
"""

SIZE = """\
## The same bytes, spent otherwise

Two models of each size: the same bits in every weight, by the default recipe, and bits chosen
weight by weight (`--target-bpw`) in as many bytes.

"""

OTHER = """\
The weights of the roles were found on this model and this text, so that it is no test of them. This
is another model, [FLA's pure KDA](../examples/tiny-fla-kda/README.md) of {mb:.1f} MB, on the same
text, by

    {command}
"""

LIMITS = """\
## What this does not say

- These are small models, of 11 and 3.5 million parameters, and one text. In Kimi Linear 48B 96 % of
  the bytes are experts, so that there is less to move from one weight to another.
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
    """Recipes, one per line."""
    headings = [
        "weights",
        "bits per weight",
        "MB",
        "bits per byte",
        "perplexity per token",
        "divergence",
    ]
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


def families(rows: list[Row]) -> str:
    """What each family does alone, the most sensitive first."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        bits, _, family = row["recipe"].partition("@")
        found.setdefault(family, {})[bits] = row
    ordered = sorted(found.items(), key=lambda item: -ratio(item[1]["q3"]))
    headings = ["family", "relative error, 4 bits / 3", "divergence, 4 bits", "3 bits"]
    return table(
        [*headings, "divergence for a relative error of 1, 4 bits / 3"],
        [
            [
                family.replace("-", " "),
                f"{at['q4']['relative_error']:.4f} / {at['q3']['relative_error']:.4f}",
                with_error(at["q4"], "divergence"),
                with_error(at["q3"], "divergence"),
                f"{ratio(at['q4']):.2f} / {ratio(at['q3']):.2f}",
            ]
            for family, at in ordered
        ],
    )


def ratio(row: Row) -> float:
    """Divergence for a relative error of 1."""
    return row["divergence"] / row["relative_error"]


def both_bits(rows: list[Row]) -> list[tuple[float, float]]:
    """What a relative error of 1 does to each family, found at 4 bits and at 3."""
    found = {row["recipe"]: ratio(row) for row in rows}
    return [(value, found["q3" + name[2:]]) for name, value in found.items() if name[:2] == "q4"]


def sizes(pairs: list[tuple[Row, Row]]) -> str:
    """Pairs of one size: the same bits everywhere, and bits chosen by weight."""
    headings = ["size of", "MB", "bits per weight", "perplexity, same bits / chosen"]
    return table(
        [*headings, "divergence, same bits", "divergence, chosen"],
        [
            [
                uniform["words"],
                f"{chosen['mb']:.1f}",
                f"{chosen['bits_per_weight']:.2f}",
                f"{uniform['perplexity']:,.1f} / {chosen['perplexity']:,.1f}",
                with_error(uniform, "divergence"),
                with_error(chosen, "divergence"),
            ]
            for uniform, chosen in pairs
        ],
    )


def of_one_size(found: dict[str, Row]) -> list[tuple[Row, Row]]:
    """(the same bits everywhere, bits chosen), the largest first."""
    names = [name for name in found if name.endswith("=size")]
    pairs = [(found[name.removesuffix("=size")], found[name]) for name in names]
    return sorted(pairs, key=lambda pair: -pair[0]["mb"])


def gates(pairs: list[tuple[Row, Row]]) -> str:
    """Pairs of recipes with the gate path kept and quantised."""
    headings = [
        "weights",
        "bits per weight, kept / quantised",
        "perplexity, kept / quantised",
        "nats per token",
        "divergence",
        "by divergence",
    ]
    return table(
        headings,
        [
            [
                row["words"],
                f"{kept['bits_per_weight']:.2f} / {row['bits_per_weight']:.2f}",
                f"{kept['perplexity']:,.1f} / {row['perplexity']:,.1f}",
                with_error(row, "gates_nats"),
                with_error(row, "gates_divergence"),
                verdict(row),
            ]
            for kept, row in pairs
        ],
    )


def page(record: dict[str, Any], other: dict[str, Any]) -> str:
    """The whole page, from the records of the two models."""
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
    plain = [row for name, row in found.items() if not set("+=@") & set(name)]
    plain.sort(key=lambda row: -row["bits_per_weight"])
    pairs = [(found[name.partition("+")[0]], row) for name, row in found.items() if "+" in name]
    alone = [row for name, row in found.items() if "@" in name]
    proportions = [ratio(row) for row in alone if row["recipe"].startswith("q3")]
    # the default recipe keeps the gate path, and the router in 8 bits
    spared = ("q4@KDA-gates", "q4@router")
    at_4 = [r for r in alone if r["recipe"].startswith("q4") and r["recipe"] not in spared]
    order = ORDER.format(
        added=sum(row["divergence"] for row in at_4),
        together=found["q4"]["divergence"],
        spread=max(proportions) / min(proportions),
        within=max(max(a / b, b / a) for a, b in both_bits(alone)),
    )
    others = {row["recipe"]: row for row in other["rows"]}
    parts = [
        *(head, recipes(plain), ""),
        *(FAMILIES + families(alone), "", order),
        *(SIZE + sizes(of_one_size(found)), ""),
        OTHER.format(mb=others["source"]["mb"], command=other["machine"]["command"]),
        *(sizes(of_one_size(others)), ""),
        *(GATES + gates(pairs), ""),
        DECISION.format(eight=1 - found["q4+gates8"]["mb"] / found["q4"]["mb"]),
        LIMITS,
    ]
    return "\n".join(parts)


def records() -> list[dict[str, Any]]:
    """What was measured on the two models."""
    names = ("quality.json", "quality-kda.json")
    return [json.loads((HERE / name).read_text(encoding="utf-8")) for name in names]


def main() -> None:
    """Write the page under a temporary name first."""
    PAGE.parent.mkdir(exist_ok=True)
    temporary = PAGE.with_suffix(".tmp")
    temporary.write_text(page(*records()), encoding="utf-8")
    temporary.rename(PAGE)


if __name__ == "__main__":
    main()
