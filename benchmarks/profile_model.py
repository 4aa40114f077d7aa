"""Where the time of a prefill and of a decode step goes, by kind of work.

    python benchmarks/profile_model.py kimi-4bit --tokens 512
    python benchmarks/profile_model.py --shape 48b --layers 8 --vocab 32768 --device gpu

Each part's inputs are evaluated before its clock starts and its outputs before it stops, so a part
pays for what it launches. A part inside another (the router inside the block of experts) stops the
other's clock. Waiting after each part costs time of its own: the same step is also timed as it
runs, and the difference is shown.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from common import add_output, count, run, timed

from mlx_kda.bench.results import Benchmark, Row, columns, markdown, show
from mlx_kda.bench.subject import Subject
from mlx_kda.bench.timing import STEADY, spread
from mlx_kda.cli.measure import add_subject, measure, subject_of
from mlx_kda.layers import MLA, KimiDeltaAttention, MoE, blas_layout, mix

BENCHMARK = Benchmark(
    "profile",
    "Where the time of a prefill and of a decode step goes, by kind of work",
    {**columns("phase tokens part ms share spread"), "as stored ms": "ms, weights as stored"},
    "Medians, each part waited for by itself; of nested parts only the inner one is counted. The "
    "last two rows of a phase: the same step left alone, and what waiting cost.",
)

MIX, OP, GATED = "KDA convolutions and gates", "KDA recurrence", "KDA gated norm"
STEP = "KDA step as a whole"
REST = "rest: residuals, caches, Python"
PARTS = (
    *("embedding", "norms", "KDA projections", MIX, OP, GATED, STEP, "KDA output projection"),
    *("MLA projections", "MLA attention", "router", "routed experts", "shared experts"),
    *("dense MLP", "head", "sampling", REST),
)
SUM, WHOLE, FORCING = "sum of the parts", "the step as it runs", "difference: waiting for each part"


class Clock:
    """Seconds of each kind of work; of nested parts only the innermost runs."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = 0.0

    def measure(self, kind: str, work: Callable, *args: Any, **options: Any) -> Any:
        """``work(*args, **options)``, its time, evaluation included, counted as ``kind``."""
        if STEP in self._open:  # compiled or fused: its parts cannot be timed one by one
            return work(*args, **options)
        mx.eval(list(_arrays([args, options])))
        self._turn()
        self._open.append(kind)
        try:
            result = work(*args, **options)
            mx.eval(list(_arrays(result)))
            return result
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def _arrays(tree: Any) -> Iterator[mx.array]:
    if isinstance(tree, mx.array):
        yield tree
    elif type(tree) is dict:
        yield from _arrays(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _arrays(item)


@contextlib.contextmanager
def instrumented(model: nn.Module, clock: Clock) -> Iterator[None]:
    """Within it every part of ``model``, a model of this package, runs under ``clock``."""
    modules = {id(module): kind for module, kind in _modules(model)}
    classes = {type(module) for module, _ in _modules(model)}
    embedding = type(model.model.embed_tokens)

    def called(original: Callable) -> Callable:
        def call(self, *args, **options):
            kind = modules.get(id(self))
            if kind is None:
                return original(self, *args, **options)
            return clock.measure(kind, original, self, *args, **options)

        return call

    def always(kind: str, original: Callable) -> Callable:
        return lambda *args, **options: clock.measure(kind, original, *args, **options)

    patches = [(cls, "__call__", called(cls.__call__)) for cls in classes]
    patches += [
        (owner, name, always(kind, getattr(owner, name)))
        for owner, name, kind in (
            (embedding, "as_linear", "head"),
            (KimiDeltaAttention, "project", "KDA projections"),
            (mix, "_operations", MIX),
            (mix, "kda", OP),
            (mix, "rms_norm", GATED),
            (mix, "gated", GATED),
            (mix, "kda_prologue", MIX),
            (mix, "kda_chunk", OP),
            (mix, "kda_recurrent", OP),
            (mix, "kda_epilogue", GATED),
            (mix, "kda_decode", STEP),
            (MLA, "_attend", "MLA attention"),
            (MoE, "route", "router"),
        )
    ]
    one_token = mix._one_token
    patches.append((mix, "_one_token", lambda *sizes: always(STEP, one_token(*sizes))))
    with contextlib.ExitStack() as stack:
        for owner, name, timed in patches:
            stack.enter_context(mock.patch.object(owner, name, timed))
        yield


def _modules(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules whose call is a part, each with its kind."""
    yield model.model.embed_tokens, "embedding"
    yield model.model.norm, "norms"
    if model.lm_head is not None:
        yield model.lm_head, "head"
    for layer in model.layers:
        yield layer.input_layernorm, "norms"
        yield layer.post_attention_layernorm, "norms"
        if layer.is_linear:
            yield layer.self_attn.o_proj, "KDA output projection"
        else:
            yield layer.self_attn, "MLA projections"
        if not isinstance(layer.mlp, MoE):
            yield layer.mlp, "dense MLP"
            continue
        yield layer.mlp, "routed experts"
        yield layer.mlp.gate, "router"
        if layer.mlp.shared_experts is not None:
            yield layer.mlp.shared_experts, "shared experts"


def rows(subject: Subject, **options: Any) -> Iterator[dict[str, Any]]:
    """`profile` our model of a subject.

    Where weights are laid out for the CPU's BLAS, a folder's model is also run with its weights as
    they are stored. Raises UserError as `Subject` does.
    """
    subject.prepare()
    models = {"": subject.ours()}
    if subject.folder is not None and blas_layout.applies():
        with blas_layout.as_stored():
            models["as stored"] = subject.ours()
    yield from profile(models, **options)


def profile(
    models: dict[str, nn.Module],
    *,
    tokens: int = 512,
    decode: int = 10,
    samples: int = 5,
    budget: float = 20.0,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a prefill, then of a decode step after it.

    Args:
        models: the model to profile as "", others to show beside it by their names.
        tokens: of the prefill, which is one step.
        decode: steps of decoding in a sample.
        samples, budget: samples, and the seconds that all of one phase may take.

    Yields:
        One row a part with its milliseconds and its share of the sum (medians over the samples);
        then the sum, the step as it runs, and their difference.
    """
    size = models[""].args.vocab_size
    prompt = mx.array(np.random.default_rng(0).integers(0, size, (1, tokens), dtype=np.int32))
    steps = {name: _Steps(model, prompt) for name, model in models.items()}
    for phase, number in (("prefill", 1), ("decode", decode)):
        taken: dict[str, list[tuple[Clock, float]]] = {name: [] for name in models}
        start = time.perf_counter()
        for i in range(-1, samples):
            for name, step in steps.items():
                sample = step.sample(phase, number)
                if i >= 0:  # the first one compiles and allocates
                    taken[name].append(sample)
            spent = time.perf_counter() - start
            if i >= 2 and spent * (i + 3) / (i + 2) > budget:
                break
        yield from _rows(phase, tokens, number, taken)


class _Steps:
    """Prefill and decoding of one model, with and without its parts being timed."""

    def __init__(self, model: nn.Module, prompt: mx.array):
        self.model, self.prompt = model, prompt
        self.cache: list[Any] = []
        self.token: mx.array | None = None

    def sample(self, phase: str, count: int) -> tuple[Clock, float]:
        """(Clock of ``count`` steps with parts timed, seconds of as many as they run)."""
        clock = Clock()
        step = self._prefill if phase == "prefill" else self._decode
        with instrumented(self.model, clock):
            for _ in range(count):
                clock.measure(REST, step, lambda f, *args: clock.measure("sampling", f, *args))
        start = time.perf_counter()
        for _ in range(count):
            step(lambda f, *args: f(*args))
        return clock, time.perf_counter() - start

    def _prefill(self, sampled: Callable) -> None:
        self.cache = self.model.make_cache()
        self._step(self.prompt, sampled)

    def _decode(self, sampled: Callable) -> None:
        self._step(self.token, sampled)

    def _step(self, inputs: mx.array, sampled: Callable) -> None:
        logits = self.model(inputs, cache=self.cache, last_only=True)
        self.token = sampled(_greedy, logits)
        mx.eval(self.token, [entry.state for entry in self.cache])


def _greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits[:, -1], axis=-1)[:, None]


def _rows(
    phase: str, tokens: int, count: int, taken: dict[str, list[tuple[Clock, float]]]
) -> Iterator[dict[str, Any]]:
    def column(of: Callable[[Clock, float], float]) -> dict[str, Any]:
        """Medians of every model, in milliseconds, and the spread of the first one."""
        values = {name: [of(*s) / count * 1e3 for s in samples] for name, samples in taken.items()}
        shown = {f"{name} ms".strip(): statistics.median(v) for name, v in values.items()}
        noise = spread(values[""])
        return {**shown, "spread": noise, "steady": noise <= STEADY, "samples": len(values[""])}

    first = taken[""][0][0]
    total = column(lambda clock, _: clock.seconds.total())
    about = {"phase": phase, "tokens": tokens}
    for part in PARTS:
        if part in first.seconds:
            row = column(lambda clock, _, part=part: clock.seconds[part])
            shares = [clock.seconds[part] / clock.seconds.total() for clock, _ in taken[""]]
            yield {**about, "part": part, "share": statistics.median(shares), **row}
    whole = column(lambda _, seconds: seconds)
    yield {**about, "part": SUM, "share": 1.0, **total}
    yield {**about, "part": WHOLE, **whole}
    names = [key for key in total if key == "ms" or key.endswith(" ms")]
    yield {**about, "part": FORCING, **{key: total[key] - whole[key] for key in names}}


PHASES = ("prefill", "decode")
STORED = "as stored ms"


def table(rows: list[Row]) -> str:
    """Parts down, milliseconds and shares of both phases across."""
    found = {(row["phase"], row["part"]): row for row in rows}
    stored = any(STORED in row for row in rows)
    columns = {"part": "part"}
    for phase in PHASES:
        columns |= {f"{phase} ms": f"{phase}, ms", f"{phase} share": "share"}
        if stored:
            columns[f"{phase} stored"] = "ms, weights as stored"
    lines = []
    for part in (*PARTS, SUM, WHOLE, FORCING):
        line: Row = {"part": part}
        for phase in PHASES:
            row = found.get((phase, part), {})
            line[f"{phase} ms"], line[f"{phase} stored"] = row.get("ms"), row.get(STORED)
            share = row.get("share")
            line[f"{phase} share"] = None if share is None else f"{share:.1%}"
        if len([value for value in line.values() if value is not None]) > 1:
            lines.append(line)
    return markdown(lines, columns)


def largest(rows: list[Row]) -> str:
    """The two largest parts of each phase in a sentence."""
    return " ".join(_sentence(phase, rows) for phase in PHASES)


def _sentence(phase: str, rows: list[Row]) -> str:
    parts = [row for row in rows if row["phase"] == phase and row["part"] in PARTS]
    first = sorted(parts, key=lambda row: -row["ms"])[:2]
    told = " and ".join(f"{row['part']} ({row['share']:.0%})" for row in first)
    sentence = f"The largest parts of a {'decode step' if phase == 'decode' else phase}: {told}"
    gains = [row for row in first if STORED in row and row["ms"] < row[STORED]]
    if gains:
        before = " and ".join(
            f"{row['part']} from {show(row[STORED])} to {show(row['ms'])} ms" for row in gains
        )
        sentence += f"; the layout of weights took {before}"
    return sentence + "."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    timed(parser)
    count(parser, "--tokens", 512, "tokens of the prefill")
    add_output(parser)


def main(args: argparse.Namespace) -> int:
    options = {"tokens": args.tokens, "samples": args.samples, "budget": args.budget}
    return measure(BENCHMARK, rows(subject_of(args), **options), args)


if __name__ == "__main__":
    sys.exit(run(__doc__, add_arguments, main))
