"""What the commands share: the parser's manners, output, sampling options, loading a model."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_kda.generate import Statistics

_ENDS = {"stop": "an end token", "length": "the limit of tokens", "interrupted": "Ctrl-C"}
# What a model writes must not drive the terminal: control characters but tab and newline.
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


class Parser(argparse.ArgumentParser):
    """argparse with examples left as they are and a mistake told in one line."""

    def __init__(self, **kwargs: Any):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def number(kind: type, low: float, high: float = float("inf")) -> Callable[[str], Any]:
    """An argparse type: an int or float in [low, high]."""
    span = f"{low} or more" if high == float("inf") else f"between {low} and {high}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            word = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {word}, {span}")
        return value

    return parse


def prepare_output() -> None:
    """Let no character that the terminal's encoding lacks end a run."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def note(line: str) -> None:
    """A line for the person, on standard error."""
    print(line, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """A model's text on standard output, at once; without control characters on a terminal."""
    if sys.stdout.isatty():
        text = text.translate(_CONTROL)
    sys.stdout.write(text)
    sys.stdout.flush()


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def describe(statistics: "Statistics") -> list[str]:
    """The statistics of one generation, as lines."""
    s = statistics
    reused = f", {s.reused_tokens:,} more were in the cache" if s.reused_tokens else ""
    by = "MLX" if s.peak_memory_source == "mlx" else "the whole process"
    return [
        f"prompt: {s.prefilled_tokens:,} tokens, {s.prompt_tps:.1f} tokens/s{reused}",
        f"generation: {s.generation_tokens:,} tokens, {s.generation_tps:.1f} tokens/s"
        + (f", ended by {_ENDS[s.finish_reason]}" if s.finish_reason else ""),
        f"peak memory: {size(s.peak_memory)} ({by})",
    ]


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The options that choose the next token."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=number(int, 0), default=512, metavar="N", help="default: 512"
    )
    group.add_argument(
        "--temp",
        type=number(float, 0),
        default=0.0,
        metavar="T",
        help="temperature; 0, the default, takes the most likely token",
    )
    group.add_argument("--top-p", type=number(float, 0, 1), default=0.0, metavar="P")
    group.add_argument("--top-k", type=number(int, 0), default=0, metavar="K")
    group.add_argument("--min-p", type=number(float, 0, 1), default=0.0, metavar="P")
    group.add_argument("--repetition-penalty", type=number(float, 0), metavar="X")
    group.add_argument("--seed", type=number(int, 0), metavar="N", help="make sampling repeatable")
    group.add_argument(
        "--prefill-step",
        type=number(int, 1),
        default=2048,
        metavar="N",
        help="tokens of the prompt read at a time (default: 2048)",
    )


def sampling_options(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """The keyword arguments of ``decode_text`` for those options."""
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    # top_k of the whole vocabulary or more leaves every token in, and mlx-lm refuses it.
    top_k = args.top_k if args.top_k < model.args.vocab_size else 0
    sampler = make_sampler(args.temp, top_p=args.top_p, min_p=args.min_p, top_k=top_k)
    processors = make_logits_processors(repetition_penalty=args.repetition_penalty)
    return {
        "max_tokens": args.max_tokens,
        "sampler": sampler,
        "logits_processors": processors,
        "seed": args.seed,
    }


def load_model(path: str) -> tuple[Any, Any]:
    """Model and tokenizer of a folder or hub id, with a word on standard error meanwhile."""
    import mlx.core as mx

    import mlx_kda

    with status(f"loading {path}"):
        model, tokenizer = mlx_kda.load(path)
    if mx.metal.is_available():
        # Weights kept resident: without it macOS may page them out between two tokens.
        mx.set_wired_limit(mx.device_info()["max_recommended_working_set_size"])
    return model, tokenizer


def kda_paths(config: Any, dtype: str, prompt: int = 2048) -> dict[str, str]:
    """What the dispatcher runs on this machine for one sequence of a model, and why.

    By "prefill" (of ``prompt`` tokens) and "decode"; ``config`` is the model's, ``dtype`` what
    it computes in.
    """
    import mlx.core as mx

    import mlx_kda

    H, D = config.linear_num_heads, config.linear_head_dim
    paths = {}
    for name, T in (("prefill", prompt), ("decode", 1)):
        # Nobody evaluates these: they stand for their shapes.
        x = mx.zeros((1, T, H, D), dtype=getattr(mx, dtype))
        g, beta = mx.zeros((1, T, H, D)), mx.zeros((1, T, H))
        paths[name] = str(mlx_kda.explain(x, x, x, g, beta, state=mx.zeros((1, H, D, D))))
    return paths


@contextlib.contextmanager
def status(message: str) -> Iterator[None]:
    """A spinner on standard error while something runs, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


@contextlib.contextmanager
def progress(label: str, *, unit: str = "tokens") -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error with rate and time left, on a terminal only.

    Gives ``update(done, total)``; the bar appears with the first one short of the total.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn(label),
        BarColumn(),
        TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = None

    def update(done: int, total: int) -> None:
        nonlocal task
        if task is None:
            if done == total:
                return
            bar.start()
            task = bar.add_task(label, total=total)
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    try:
        yield update
    finally:
        bar.stop()
