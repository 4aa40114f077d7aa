"""The many rows of `bench cuda` as a few tables: time by length, errors by inputs, ratios."""

from collections.abc import Iterable
from typing import Any

from . import results

Row = dict[str, Any]
_OURS = ("ours, kda_chunk exact", "ours, kda_chunk half", "ours, kda_recurrent", "ours, operations")
_PEERS = ("mlx-lm, loop", "mlx-lm, vector kernel", "FLA chunk_kda", "FlashKDA")


def markdown(rows: list[Row]) -> str:
    """Sections of Markdown: times for each number of heads, ratios, errors, what failed."""
    row = rows[0]["row"] if rows else ""
    parts = []
    for H in _values(rows, "H"):
        timed = [r for r in rows if r["H"] == H and r["row"] == row and "ms" in r]
        parts.append(f"### {H} heads: milliseconds by length, {row} inputs\n\n{_times(timed)}")
    ratios = [r for r in rows if r["row"] == row and "ms" in r]
    parts.append(f"### Times as fast as a peer, {row} inputs, the same dtype\n\n{_ratios(ratios)}")
    known = [r for r in rows if "error" in r]
    if known:
        T = max(r["T"] for r in known)
        errors = _errors([r for r in known if r["T"] == T])
        parts.append(f"### Error of output / state by inputs, {T:,} tokens\n\n{errors}")
    parts += _remarks(rows)
    return "\n\n".join(parts)


def _times(rows: list[Row]) -> str:
    return _pivot(rows, "T", lambda r: ("" if results.steady(r) else "~") + results.show(r["ms"]))


def _errors(rows: list[Row]) -> str:
    return _pivot(rows, "row", lambda r: f"{r['error']:.1e} / {r['state_error']:.1e}")


def _pivot(rows: list[Row], across: str, cell) -> str:
    """A line for each candidate and dtype, a column for each value of ``across``."""
    columns = _values(rows, across)
    lines = []
    for name, dtype in dict.fromkeys((r["candidate"], r["dtype"]) for r in rows):
        mine = {r[across]: r for r in rows if (r["candidate"], r["dtype"]) == (name, dtype)}
        cells = {c: cell(mine[c]) for c in columns if c in mine}
        lines.append({"candidate": name, "dtype": dtype, **cells})
    headings = {c: f"{c:,}" if isinstance(c, int) else c for c in columns}
    return results.markdown(lines, {"candidate": "candidate", "dtype": "dtype", **headings})


def _ratios(rows: list[Row]) -> str:
    """Peer's time over ours, for every path of ours, peer and length that both were timed on."""
    timed = {(r["candidate"], r["dtype"], r["H"], r["T"]): r for r in rows}
    columns = {(r["H"], r["T"]): f"H {r['H']}, T {r['T']:,}" for r in rows}
    lines = []
    for dtype in _values(rows, "dtype"):
        for ours in _OURS:
            for peer in _PEERS:
                line: Row = {"ours": ours, "peer": peer, "dtype": dtype}
                for H, T in columns:
                    pair = timed.get((ours, dtype, H, T)), timed.get((peer, dtype, H, T))
                    if None not in pair:
                        ratio = results.show(pair[1]["ms"] / pair[0]["ms"])
                        line[(H, T)] = ("" if all(map(results.steady, pair)) else "~") + ratio
                if len(line) > 3:
                    lines.append(line)
    return results.markdown(lines, {"ours": "ours", "peer": "peer", "dtype": "dtype", **columns})


def _remarks(rows: list[Row]) -> list[str]:
    parts = []
    failed = dict.fromkeys((r["candidate"], r["failed"]) for r in rows if "failed" in r)
    parts += [f"{name} could not run: {why}" for name, why in failed]
    if noise := results.noise(rows):
        parts.append(f"{noise}: marked ~, and ratios of them too.")
    return parts


def _values(rows: Iterable[Row], key: str) -> list:
    return list(dict.fromkeys(r[key] for r in rows))
