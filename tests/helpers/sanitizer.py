"""For cuda_check.py: what compute-sanitizer's logs say, and by whose kernel."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path


def read(logs: Iterable[Path]) -> tuple[Counter, bool]:
    """(Findings of all logs, whether each has its last line and that of a run that passed)."""
    count = Counter()
    whole = True
    for log in logs:
        text = log.read_text(errors="replace")
        count.update(count_findings(text))
        whole &= "SUMMARY" in text and '"passed": true' in text
    return count, whole


def count_findings(log: str) -> Counter:
    """compute-sanitizer's findings in our kernels, in MLX's and in calls of the host, by name."""
    count = Counter()
    for block in re.split(r"\n=+ *(?=\n)", log):
        at = re.search(r"\bat ([^\n]+)\+0x", block)
        ours = re.search(
            r"custom_kernel_((?:kda|moe)_\w+?)_[0-9a-f]{16}", at.group(1) if at else ""
        )
        if ours:
            count.update(["ours", ours.group(1)])
        elif at:
            count.update(["others", re.split(r"[<(]", at.group(1))[0].split()[-1]])
        elif re.search(r"Host API|API call|Program hit", block):
            count["host calls"] += 1
    count["summaries"] = len(re.findall(r"(?:ERROR|RACECHECK) SUMMARY", log))
    return count
