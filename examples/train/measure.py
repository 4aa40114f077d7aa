"""Measure a tiny checkpoint with mlx_kda and write the numbers into its card.

    python measure.py --data ../../.train --minutes 20
    python measure.py --data ../../.train --minutes 20 --family kda

Every case's outcome is kept in results.json (of the second checkpoint results-kda.json), so a run
that is cut short continues where it stopped, and the card says how many cases stand behind each
number. The long lengths of the exact cache come from train.py's own evaluation on the training
machine (device.json, device-kda.json), because a CPU takes minutes a case there; the table keeps
the two apart.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from checks import Case, fact_cases, gloss_cases, pass_key_cases, per_byte, turn_cases
from tasks import Corpus

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


# What may stand between a fact and the question for it, and its name in the card.
BETWEEN = {"questions": "questions for words and their answers", "sentences": "one long message"}


@dataclass(frozen=True)
class Family:
    """A checkpoint to measure: its folder, the suffix of its records, what is asked of it."""

    folder: str
    suffix: str
    trained: int  # longest row of training
    # (policy, {prompt length: cases}); the cheapest first.
    pass_keys: tuple[tuple[str, dict[int, int]], ...]
    # {tokens between telling a fact and asking for it: cases}, for each kind in BETWEEN.
    facts: dict[int, int] = field(default_factory=dict)

    def record(self, name: str) -> Path:
        """The file of a record: "results" or "device"."""
        return HERE / f"{name}{self.suffix}.json"


FAMILIES = {
    "kimi": Family(
        "tiny-kimi-linear",
        "",
        8192,
        (
            ("exact", {1024: 8, 2048: 4, 4096: 4, 8192: 2}),
            ("window:1024+16", {1024: 8, 2048: 4, 4096: 4, 8192: 2}),
            ("int8", {2048: 4}),
            ("int4", {2048: 4}),
            ("exact", {16384: 1}),
            ("window:1024+16", {16384: 1}),
        ),
    ),
    "kda": Family(
        "tiny-fla-kda",
        "-kda",
        8192,
        (("exact", {512: 8, 2048: 4}),),
        {256: 20, 512: 20, 1024: 20, 2048: 20, 4096: 12, 16384: 4},
    ),
}


def plan(corpus: Corpus, family: Family) -> Iterator[tuple[str, str, Case]]:
    """(name of the measurement, cache policy, case), in the order of measuring."""
    for case in gloss_cases(corpus, 100):
        yield "glosses", "exact", case
    for kind in ("facts", "pairs"):
        for case in turn_cases(corpus, kind, 10, 300):
            yield kind, "exact", case
    for policy, lengths in family.pass_keys:
        for length, count in lengths.items():
            for case in pass_key_cases(corpus, length, count):
                yield f"pass key {length}", policy, case
    for tokens, count in family.facts.items():
        for kind in BETWEEN:
            for case in fact_cases(corpus, kind, tokens, count):
                yield f"fact after {tokens} of {kind}", "exact", case


def answers(model: Any, case: Case, policy: str) -> bool:
    """Whether greedy decoding under a cache policy gives exactly the case's answer."""
    from mlx_kda.context import Context

    context = Context(model, policy=policy)
    context.prefill(case.ids[: case.start])
    first = context.logits.argmax(-1)
    rest = model(mx.array([case.ids[case.start : -1]]), cache=context.cache)[0].argmax(-1)
    found = np.concatenate([np.array(first), np.array(rest)])
    return bool(np.array_equal(found, case.ids[case.start :]))


def text_nats(model: Any, ids: list[int], step: int = 512) -> float:
    """Negative log-likelihood in nats of every token but the first."""
    total, cache = 0.0, model.make_cache()
    for at in range(0, len(ids) - 1, step):
        target = mx.array(ids[at + 1 : at + 1 + step])
        logits = model(mx.array([ids[at : at + target.size]]), cache=cache)[0].astype(mx.float32)
        chosen = mx.take_along_axis(logits, target[:, None], -1)[:, 0]
        total += float((mx.logsumexp(logits, -1) - chosen).sum())
    return total


def measure(
    folder: Path, corpus: Corpus, family: Family, results: dict, minutes: float, save: Path
) -> None:
    """Run what results lack until the time is up."""
    from mlx_kda import load

    began = time.time()
    model, _ = load(folder)
    if "held_out_bits_per_byte" not in results:
        ids = corpus.tokenizer.encode(corpus.held_out)
        nats = text_nats(model, ids)
        results["held_out_bits_per_byte"] = round(per_byte(nats, corpus.held_out), 4)
        results["held_out_perplexity"] = round(math.exp(nats / (len(ids) - 1)), 2)
    cases = results.setdefault("cases", {})
    for number, (name, policy, case) in enumerate(plan(corpus, family)):
        if time.time() - began > minutes * 60:
            print(f"time is up at case {number}; run again to go on")
            break
        key = f"{number} | {name} | {policy}"
        if key not in cases:
            cases[key] = answers(model, case, policy)
            print(key, "right" if cases[key] else "wrong", flush=True)
            save.write_text(json.dumps(results, indent=1) + "\n")
    save.write_text(json.dumps(results, indent=1) + "\n")


def tally(results: dict) -> dict[tuple[str, str], tuple[int, int]]:
    """(measurement, policy) -> (right, of)."""
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for key, right in results["cases"].items():
        _, name, policy = key.split(" | ")
        a, b = counts.get((name, policy), (0, 0))
        counts[name, policy] = (a + right, b + 1)
    return counts


def tables(results: dict, device: dict, family: Family = FAMILIES["kimi"]) -> str:
    """The card's measured part, in markdown."""
    counts = tally(results)

    def cell(name: str, policy: str = "exact") -> str:
        right, of = counts.get((name, policy), (0, 0))
        return f"{right} of {of}" if of else "-"

    bits, perplexity = results["held_out_bits_per_byte"], results["held_out_perplexity"]
    lines = [
        "| what | mlx_kda on a CPU, bfloat16 | PyTorch on one H200, bfloat16 |",
        "|---|---|---|",
        f"| glosses of common nouns, word for word | {cell('glosses')} | "
        f"{device['glosses']:.1%} of {device['counts']['glosses']:,} |",
        f"| facts told earlier in a conversation | {cell('facts')} | "
        f"{device['facts']:.0%} of {device['counts']['facts']} |",
        f"| number looked up in a list of pairs | {cell('pairs')} | "
        f"{device['pairs']:.0%} of {device['counts']['pairs']} |",
        f"| held-out text (Book of Ruth) | {bits:.3f} bits per byte, perplexity "
        f"{perplexity:.1f} per token | {device['held_out_bits_per_byte']:.3f} bits per byte |",
        "",
        f"Pass key found, by length of the prompt in tokens (trained up to {family.trained:,}):",
        "",
    ]
    lengths = sorted(int(n) for n in device["pass_key"])
    policies = list(dict.fromkeys(policy for policy, _ in family.pass_keys))
    lines.append("| prompt | exact, H200 | " + " | ".join(f"{p}, CPU" for p in policies) + " |")
    lines.append("|---|---|" + "---|" * len(policies))
    for length in lengths:
        share = device["pass_key"][str(length)]
        row = [f"{length:,}", f"{share:.0%} of {device['counts']['pass_key'][str(length)]}"]
        row += [cell(f"pass key {length}", policy) for policy in policies]
        lines.append("| " + " | ".join(row) + " |")
    if family.facts:
        lines += ["", "A fact told first and asked for after tokens of other talk (CPU):", ""]
        lines.append("| tokens between | " + " | ".join(BETWEEN.values()) + " |")
        lines.append("|---|" + "---|" * len(BETWEEN))
        for tokens in family.facts:
            row = [f"{tokens:,}", *(cell(f"fact after {tokens} of {kind}") for kind in BETWEEN)]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def write_card(card: Path, text: str) -> None:
    """Replace what stands between the marks of the card."""
    old = card.read_text(encoding="utf-8")
    before, rest = old.split(BEGIN)
    after = rest.split(END)[1]
    temporary = card.with_suffix(".tmp")
    temporary.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    temporary.rename(card)


def main() -> None:
    """Measure, then write the card."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder made by prepare.py; needed to measure")
    parser.add_argument("--family", choices=FAMILIES, default="kimi")
    parser.add_argument("--folder", type=Path, help="default: the family's folder in examples/")
    parser.add_argument("--minutes", type=float, default=0.0, help="0: only write the card")
    args = parser.parse_args()
    family = FAMILIES[args.family]
    folder = args.folder or HERE.parent / family.folder
    record = family.record("results")
    results = json.loads(record.read_text()) if record.exists() else {}
    if args.minutes and args.data:
        measure(folder, Corpus(args.data, args.family), family, results, args.minutes, record)
    device = json.loads(family.record("device").read_text())
    write_card(folder / "README.md", tables(results, device, family))


if __name__ == "__main__":
    main()
