"""What the commands share: the parser's manners, output, sampling options, loading a model."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mlx_kda.errors import UserError
from mlx_kda.words import size

if TYPE_CHECKING:
    from mlx_kda.cache.report import LayerReport
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


def describe(statistics: "Statistics") -> list[str]:
    """The statistics of one generation, as lines."""
    s = statistics
    reused = f", {s.reused_tokens:,} more were in the cache" if s.reused_tokens else ""
    by = "MLX" if s.peak_memory_source == "mlx" else "the whole process"
    guessed = (
        [f"speculation: {s.accepted_tokens:,} of {s.drafted_tokens:,} guessed tokens were right"]
        if s.drafted_tokens
        else []
    )
    return [
        f"prompt: {s.prefilled_tokens:,} tokens, {s.prompt_tps:.1f} tokens/s{reused}",
        f"generation: {s.generation_tokens:,} tokens, {s.generation_tps:.1f} tokens/s"
        + (f", ended by {_ENDS[s.finish_reason]}" if s.finish_reason else ""),
        *guessed,
        f"cache: {size(s.cache_bytes)}, policy {s.policy}",
        f"peak memory: {size(s.peak_memory)} ({by})",
    ]


def describe_layers(layers: "list[LayerReport]", tokens: int) -> list[str]:
    """What is in force in each layer's cache, layers that are alike on one line."""
    groups: dict[tuple, list[LayerReport]] = {}
    for layer in layers:
        groups.setdefault((layer.kind, layer.in_force, layer.asked), []).append(layer)
    lines = []
    for (kind, in_force, asked), same in groups.items():
        numbers = _ranges([layer.index for layer in same])
        asked_for = f" (asked for {asked})" if kind == "mla" else ""
        at = sum(layer.bytes_at(tokens) for layer in same)
        now = [layer.now for layer in same if layer.now is not None]
        allocated = f", {size(sum(now))} allocated now" if now else ""
        lines.append(
            f"{kind.upper()} layers {numbers}: {in_force}{asked_for}: "
            f"{size(at)} at {tokens:,} tokens{allocated}"
        )
    return lines


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers with runs shortened: 0-2, 4-6."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return ", ".join("-".join(map(str, run)) for run in runs)


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
        "--speculate",
        action="store_true",
        help="guess tokens from repetitions in the text and verify them: the same text, sooner",
    )
    add_prefill_step(parser)


def add_prefill_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill-step",
        type=number(int, 1),
        default=2048,
        metavar="N",
        help="tokens of the prompt read at a time (default: 2048)",
    )


def add_memory(parser: argparse.ArgumentParser) -> None:
    """The options of the cache and of what fits."""
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--policy",
        metavar="P",
        help="what the attention layers keep: exact (the default), window:N or window:N+S (the "
        "last N tokens and the first S), int8, int4, or both as in window:4096+16,int8",
    )
    group.add_argument(
        "--force", action="store_true", help="run although this machine's memory is too small"
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
        "speculate": args.speculate,
    }


def running(path: str) -> tuple[Any, int, str]:
    """Config, bytes of weights, and the dtype it computes in, of a checkpoint that can run."""
    from mlx_kda.convert import inspect
    from mlx_kda.convert.source import open_source
    from mlx_kda.models import read_config
    from mlx_kda.plan import activation_dtype

    found = inspect(path)
    if found.problem is not None:
        raise UserError(found.problem)
    config = read_config(open_source(path).config)
    return config, found.nbytes, activation_dtype(found.dtypes)


def check_context(config: Any, tokens: int) -> None:
    """Raise UserError for more tokens than the model was made for."""
    if tokens > config.model_max_length:
        raise UserError(
            f"{tokens:,} tokens are more than the model's context of {config.model_max_length:,}"
        )


def check_memory(args: argparse.Namespace, tokens: int, policy: str | None) -> None:
    """Raise UserError where a text of so many tokens cannot fit, unless --force was given."""
    from mlx_kda import plan
    from mlx_kda.cache import Policy

    chosen = Policy.parse(policy or "exact")
    config, weights, dtype = running(args.model)
    tokens = min(tokens, config.model_max_length)
    wanted = plan.need(config, weights, plan.FLOATS[dtype], tokens, chosen, args.prefill_step)
    if not args.force:
        plan.check(wanted)


def load_model(path: str) -> Any:
    """The model of a folder or hub id, with a word on standard error meanwhile."""
    import mlx.core as mx

    from mlx_kda.models import load_model as load

    with status(f"loading {path}"):
        model = load(path)
    limit = mx.device_info(mx.default_device()).get("max_recommended_working_set_size")
    if mx.metal.is_available() and limit:  # a Mac's CPU has no such limit
        # Weights kept resident: without it macOS may page them out between two tokens.
        mx.set_wired_limit(limit)
    return model


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder or hub id."""
    from mlx_kda.convert.source import open_source
    from mlx_kda.tokenizer import load_tokenizer as load

    return load(open_source(path).folder)


def load_session(args: argparse.Namespace, path: str, model: Any, tokenizer: Any) -> Any:
    """The session of a file; UserError where the command asks for another than it is."""
    from mlx_kda.cache import Policy
    from mlx_kda.session import Session

    session = Session.load(path, model, tokenizer, prefill_step=args.prefill_step)
    if args.policy is not None and Policy.parse(args.policy) != session.policy:
        raise UserError(
            f"{path} was saved under the policy {session.policy}, not {args.policy}: leave out "
            "--policy, or name another file"
        )
    if args.system is not None and args.system != session.system:
        raise UserError(
            f"{path} has another system message: leave --system out, or name another file"
        )
    return session


def kda_paths(config: Any, dtype: str, prompt: int = 2048) -> dict[str, str]:
    """What runs a model's KDA layers on this machine for one sequence, and why.

    By "prefill" (of ``prompt`` tokens) and "decode"; ``config`` is the model's, ``dtype`` what
    it computes in.
    """
    import mlx.core as mx

    import mlx_kda
    from mlx_kda.kernels import resolve
    from mlx_kda.kernels.layer import choose

    H, (Hv, Dv, Dk) = config.linear_num_heads, config.linear_state_shape
    on_kernels = resolve()[0] != "ops"
    paths = {}
    for name, T in (("prefill", prompt), ("decode", 1)):
        choice = choose(T, Dk, Dv, getattr(mx, dtype), config.linear_conv_kernel_dim)
        if on_kernels and choice.kernel is not None:
            paths[name] = f"{choice.kernel}: {choice.reason}"
            continue
        # Nobody evaluates these: they stand for their shapes.
        k, v = (mx.zeros((1, T, *s), dtype=getattr(mx, dtype)) for s in ((H, Dk), (Hv, Dv)))
        g, beta = mx.zeros((1, T, Hv, Dk)), mx.zeros((1, T, Hv))
        chosen = mlx_kda.explain(k, k, v, g, beta, runner="ops" if on_kernels else "auto")
        paths[name] = f"{chosen.path}: {choice.reason}" if on_kernels else str(chosen)
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
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f} {unit}/s")

    bar = Progress(
        TextColumn(label),
        BarColumn(),
        TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}"),
        Rate(),
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
