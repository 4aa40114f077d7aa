"""Show everything in under a minute: convert, chat, continue a prompt, find a pass key, resume.

Converts examples/tiny-kimi-linear of this project's repository, or the given checkpoint, in a
temporary folder that is removed at the end.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..format import size
from . import loading, options, output, reports
from .options import BITS, add_option, add_policy
from .signals import exit_on_signals

if TYPE_CHECKING:
    from ..convert import ConversionReport
    from ..generate import Piece, Statistics
    from ..session import Session

SUMMARY = "convert a small checkpoint and show what it can do"
EXAMPLE = (
    "mlx-kda demo\n"
    "  mlx-kda demo --tokens 8000 --policy window:1024+16\n"
    "  mlx-kda demo path/to/checkpoint --q-bits 8"
)
SHOWN = 512  # tokens of the long prompt between two lines of progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=options.file_name,
        nargs="?",
        metavar="SRC",
        help="folder of a checkpoint (default: examples/tiny-kimi-linear)",
    )
    count, bits = options.number(int, 1), options.one_of(*BITS)
    add_option(parser, "--q-bits", "N", bits, "bits of the quantised weights (default: 4)", 4)
    add_option(
        parser,
        "--max-tokens",
        "N",
        count,
        "largest number of tokens in an answer (default: 40)",
        40,
    )
    add_option(
        parser,
        "--tokens",
        "N",
        options.number(int, 64),
        "tokens of the long prompt that hides the pass key (default: 2048)",
        2048,
    )
    add_policy(parser)


def run(args: argparse.Namespace) -> int:
    if args.source is not None:
        loading.check_model(args.source)

    from ..demo import find_checkpoint, scratch_folder

    source = find_checkpoint(args.source)
    config = loading.check_model(str(source))
    if config is not None:
        loading.note_policy(config, args.policy)

    from ..tokenizer import load_tokenizer

    start = time.perf_counter()
    policy = str(args.policy or "exact")
    with exit_on_signals(), scratch_folder() as scratch:
        out = scratch / f"{source.resolve().name}-{args.q_bits}bit"
        report = _convert(source, out, args.q_bits)
        model, tokenizer = loading.load_model(str(out)), load_tokenizer(out)
        _converse(model, tokenizer, policy, args.max_tokens)
        session, answer = _find_key(model, tokenizer, policy, args.tokens)
        _resume(session, answer, scratch / "demo.session")
    _explain(session, report.dtype, args.policy is not None)
    output.heading(
        f"All of this took {time.perf_counter() - start:.0f} s. For Kimi Linear 48B run:"
    )
    print("  mlx-kda convert moonshotai/Kimi-Linear-48B-A3B-Instruct kimi-4bit --q-bits 4")
    print("  mlx-kda chat kimi-4bit")
    return 0


def _convert(source: Path, out: Path, bits: int) -> "ConversionReport":
    """Convert, and print the plan and the report."""
    from ..convert import convert, plan
    from ..demo import working_dtype

    dtype = working_dtype()
    output.heading(f"Converting {source} to {bits} bits")
    recipe: dict[str, Any] = {"q_bits": bits, "dtype": dtype}
    planned = plan(source, out, **recipe)
    kinds = " and ".join(f"{n} {kind.upper()}" for kind, n in planned.layers.items())
    output.detail(
        f"{planned.model_type}: {kinds} layers, {planned.parameters / 1e6:,.1f} M parameters; "
        f"plan: {size(planned.bytes_in)} -> {size(planned.bytes_out)}, peak memory "
        f"{size(planned.peak_bytes)} (predicted)"
    )
    with output.byte_progress("converting") as progress:
        report = convert(source, out, **recipe, progress=progress)
    kept = ", ".join(dict.fromkeys(report.kept.values()))
    output.detail(
        f"{report.seconds:.1f} s: {report.how()}, {report.bits_per_weight:.2f} bits per weight; "
        f"not quantised: {kept}"
    )
    if dtype is not None:
        output.detail(f"(the rest in {dtype}: MLX's CPU build multiplies 16-bit matrices slowly)")
    return report


def _converse(model: Any, tokenizer: Any, policy: str, max_tokens: int) -> None:
    """Ask three questions if the model has a chat template, and continue a prompt."""
    from ..demo import OPENING, QUESTIONS
    from ..generate import Statistics
    from ..session import Session

    if tokenizer.has_chat_template:
        output.heading(
            "Three questions in one conversation; each turn processes only its new tokens"
        )
        conversation = Session(model, tokenizer, policy)
        for question in QUESTIONS:
            statistics = Statistics()
            print(f"> {question}")
            _stream(conversation.send(question, max_tokens=max_tokens, statistics=statistics))
            output.detail(_rates(statistics))
    output.heading("Continuing a prompt")
    statistics = Statistics()
    text = Session(model, tokenizer, policy)
    text.prefill(OPENING)
    output.write(OPENING)
    _stream(text.generate(max_tokens, statistics=statistics))
    s = statistics
    output.detail(f"{s.generation_tokens:,} tokens generated, {s.generation_tps:.1f} tokens/s")


def _find_key(model: Any, tokenizer: Any, policy: str, tokens: int) -> "tuple[Session, str]":
    """Hide a pass key in a long prompt and ask for it, showing memory and speed meanwhile."""
    from ..demo import KEY, KEY_QUESTION, haystack
    from ..session import Session

    session = Session(model, tokenizer, policy, prefill_step=_step())
    if session.context.limit is not None:
        tokens = min(tokens, session.context.limit // 2)
    text = haystack(tokenizer, tokens)
    output.heading(f"A pass key, {KEY}, hidden in a prompt of {tokens:,} tokens")
    start = time.perf_counter()

    def progress(done: int, total: int) -> None:
        if done and (done == total or done % SHOWN == 0):
            output.detail(_reading(session, done, total, done / (time.perf_counter() - start)))

    print(f"> ... {KEY_QUESTION}")
    answer = _stream(_ask(session, text, progress))
    output.detail(
        "right"
        if KEY in answer
        else "wrong: the model, its quantisation or the cache policy lost it"
    )
    return session, answer


def _step() -> int:
    """Tokens of the long prompt processed at a time, few enough to show progress."""
    from ..step import prefill_step

    return min(SHOWN, prefill_step())


def _ask(session: "Session", text: str, progress: Any = None) -> "Iterator[Piece]":
    """The answer to a message, or its continuation if there is no chat template."""
    if session.tokenizer.has_chat_template:
        return session.send(text, max_tokens=24, progress=progress)
    session.prefill(text, progress=progress)
    return session.generate(24)


def _reading(session: "Session", done: int, total: int, rate: float) -> str:
    """A line of progress: tokens, speed and memory."""
    from ..generate import peak_memory

    held = {"kda": 0, "mla": 0}
    for layer in session.layers():
        held[layer.kind] += layer.bytes_at(done)
    return (
        f"{done:6,} of {total:,} tokens, {rate:,.0f} tokens/s; KDA states "
        f"{size(held['kda'])}, latents {size(held['mla'])}, peak memory "
        f"{size(peak_memory()[0])}"
    )


def _resume(session: "Session", answer: str, path: Path) -> None:
    """Save the session and load it; both must continue alike, without processing anything again."""
    from ..demo import KEY_QUESTION
    from ..session import Session

    output.heading("Saving the session, loading it, and asking again")
    start = time.perf_counter()
    session.save(path)
    saved = time.perf_counter() - start
    resumed = Session.load(path, session.context.model, session.tokenizer)
    loaded = time.perf_counter() - start - saved
    known = len(resumed.tokens)
    print(f"> {KEY_QUESTION}")
    _stream(_ask(resumed, KEY_QUESTION))
    for _ in _ask(session, KEY_QUESTION):
        pass
    if resumed.tokens != session.tokens:
        raise UserError("the resumed session answered differently: please report this")
    output.detail(
        f"{size(path.stat().st_size)}, saved in {saved:.2f} s, loaded in {loaded:.2f} s; "
        f"{known:,} tokens not processed again; the same answer as the session in memory"
    )


def _explain(session: "Session", dtype: str, asked: bool) -> None:
    """Print which kernels or operations ran, which cache policy, and why."""
    import mlx.core as mx

    from .. import doctor

    model = session.context.model
    output.heading("What ran")
    if model.kda_layers:
        by = "MLX's operations" if model.runner == "ops" else f"kernels by {model.runner}"
        print(f"KDA layers: {by}: {model.runner_reason}")
        for name, how in _paths(model, dtype).items():
            output.detail(f"{name}: {how}")
    if model.runner != "ops":
        verdicts = list(doctor.check_model(model, getattr(mx, dtype), model.runner))
        good = sum(v.ok for v in verdicts)
        print(f"self-check: {good} of {len(verdicts)} kernels agree with MLX's operations")
        for verdict in verdicts:
            output.detail(doctor.describe(verdict))
    why = "as requested" if asked else "the default: nothing is left out or rounded"
    print(f"cache policy: {session.policy}, {why}")
    for line in reports.describe_layers(session.layers(), len(session.tokens)):
        output.detail(line)


def _paths(model: Any, dtype: str) -> dict[str, str]:
    """What runs a chunk of a prompt and what runs one token, and why."""
    import mlx.core as mx

    layer = model.kda_layers[0]
    lengths = {"prefill": _step(), "decode": 1}
    return {name: str(layer.choose(T, getattr(mx, dtype))) for name, T in lengths.items()}


def _rates(statistics: "Statistics") -> str:
    s = statistics
    reused = f", {s.reused_tokens:,} reused" if s.reused_tokens else ""
    return (
        f"{s.prefilled_tokens:,} tokens prefilled{reused}; {s.generation_tokens:,} generated, "
        f"{s.generation_tps:.1f} tokens/s"
    )


def _stream(pieces: "Iterator[Piece]") -> str:
    """Print pieces as they arrive; returns the whole text."""
    text = []
    for piece in pieces:
        text.append(piece.text)
        output.write(piece.text)
    output.write("\n")
    return "".join(text)
