"""Numbers and names formatted for people."""

from collections.abc import Iterable

SHOWN = 4  # names spelled out by ``listed``; the rest are counted


def size(count: float) -> str:
    """A number of bytes, in powers of 1000: 1.5 GB."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def tokens(count: int) -> str:
    """A number of tokens: 1 token, 2 tokens."""
    return f"{count:,} token{'' if count == 1 else 's'}"


def listed(names: Iterable[str]) -> str:
    """A few names and the count of the rest, for one line."""
    names = list(names)
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
