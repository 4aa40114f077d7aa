"""How the commands' options are read, and the options that several commands share."""

import argparse
import difflib
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from ..cache.policy import Policy
from ..errors import UserError

LARGEST = 10**9  # tokens to generate, of a top-k, or of a context
LARGEST_SEED = 2**64 - 1
LOWEST_TEMPERATURE = 1e-4
BITS = (2, 3, 4, 5, 6, 8)  # of quantised weights


class Parser(argparse.ArgumentParser):
    """An ``argparse`` parser that keeps examples as written and reports a mistake in one line."""

    def __init__(self, **kwargs: Any):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse, but a command reports its unknown arguments itself, not the program."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._suggestion(unknown[0])}")
        return namespace, unknown

    def _suggestion(self, word: str) -> str:
        """What an unknown argument was probably meant to be."""
        if not word.startswith("-") and "--prompt" in self._option_string_actions:
            return "; a prompt is given with --prompt"
        near = difflib.get_close_matches(word.partition("=")[0], self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near and word.startswith("--") else ""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())  # a value may hold line breaks, and be long
        line = re.sub(r"\S{61,}", lambda found: found[0][:40] + "...", line)
        self.exit(2, f"{self.prog}: {line} (see {self.prog} --help)\n")


# Types of values: each parses a string, or raises ArgumentTypeError with a reason.


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """An int or a finite float in [low, high]."""
    span = f"of {low:,} or more" if high == math.inf else f"between {low:,} and {high:,}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high or value == math.inf:
            word = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {word} {span}")
        return value

    return parse


def numbers(text: str) -> list[int]:
    """Whole numbers of 1 or more, as in 1,512,2048."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,512,2048")
    return values


def one_of(*values: int) -> Callable[[str], int]:
    """One of several whole numbers."""

    def parse(text: str) -> int:
        if text not in map(str, values):
            choices = ", ".join(map(str, values))
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {choices}")
        return int(text)

    return parse


def file_name(text: str) -> str:
    """The name of a file or folder, not empty (as an unset shell variable would be)."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def utf8_text(text: str) -> str:
    """Text that can be encoded.

    Bytes of an argument that are not UTF-8 arrive as lone surrogates, which no tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("this is not UTF-8 text") from None
    return text


def policy(text: str) -> Policy:
    """A cache policy by its name."""
    try:
        return Policy.parse(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# Options. ``parser`` may be a group of a parser, too.


def add_option(
    parser: Any, flag: str, metavar: str, parse: Callable, help: str, default: Any = None
) -> None:
    """Add an option that takes a value; ``help`` names the default."""
    parser.add_argument(flag, metavar=metavar, type=parse, help=help, default=default)


def add_model(parser: Any, **options: Any) -> None:
    parser.add_argument(
        "model", metavar="MODEL", **{"help": "folder or hub id of a checkpoint", **options}
    )


def add_json(parser: Any, help: str = "print one JSON object") -> None:
    parser.add_argument("--json", action="store_true", help=help)


def add_revision(parser: Any) -> None:
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id")


def add_context(parser: Any, help: str) -> None:
    add_option(
        parser, "--context", "N", number(int, 1, LARGEST), f"{help} (default: 131072)", 131072
    )


def add_policy(parser: Any, what: str = "", default: str = "exact", **options: Any) -> None:
    parser.add_argument(
        "--policy",
        type=policy,
        metavar="P",
        help=f"{what}what attention layers keep of the context: exact (all of it), window:N or "
        "window:N+S (the last N tokens and the first S), int8, int4, or both as in "
        f"window:4096+16,int8 (default: {default})",
        **options,
    )


def add_prefill_step(parser: Any) -> None:
    add_option(
        parser,
        "--prefill-step",
        "N",
        number(int, 1, LARGEST),
        "tokens of the prompt processed at a time; Ctrl-C waits for one such step (default: 2048 "
        "on a GPU, 64 on a CPU)",
    )


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the options of the cache and of what fits."""
    group = parser.add_argument_group("memory")
    add_policy(group)
    group.add_argument(
        "--force", action="store_true", help="run even if this machine has too little memory"
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the next token; ``sampling_options`` reads them."""
    group = parser.add_argument_group("sampling")
    probability, count = number(float, 0, 1), number(int, 0, LARGEST)
    add_option(
        group,
        "--max-tokens",
        "N",
        count,
        "largest number of tokens to generate (default: 512)",
        512,
    )
    temperature = number(float, 0, 100)
    add_option(
        group, "--temp", "T", temperature, "temperature (default: 0, the most likely token)", 0.0
    )
    add_option(
        group,
        "--top-p",
        "P",
        probability,
        "sample from the most likely tokens that make up this probability (default: 0, all)",
        0.0,
    )
    add_option(
        group, "--top-k", "K", count, "sample from the K most likely tokens (default: 0, all)", 0
    )
    add_option(
        group,
        "--min-p",
        "P",
        probability,
        "leave out tokens less likely than P times the most likely one (default: 0, none)",
        0.0,
    )
    add_option(
        group,
        "--repetition-penalty",
        "X",
        number(float, 0.1, 10),
        "above 1: make the last 20 tokens less likely by this factor (default: 1, no penalty)",
    )
    add_option(
        group,
        "--seed",
        "N",
        number(int, 0, LARGEST_SEED),
        "seed that makes sampling repeatable (default: a new one each time)",
    )
    group.add_argument(
        "--speculate",
        action="store_true",
        help="draft tokens from repetitions in the context and verify them: faster, same output",
    )
    add_prefill_step(parser)


def sampling_options(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """The keyword arguments of ``decode_text`` for the options of ``add_sampling``."""
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    # Below this MLX's float32 overflows, and the most likely token is certain long before.
    temp = args.temp if args.temp >= LOWEST_TEMPERATURE else 0.0
    # mlx-lm refuses a top_k of the whole vocabulary or more, which leaves every token in.
    top_k = args.top_k if args.top_k < model.args.vocab_size else 0
    return {
        "max_tokens": args.max_tokens,
        "sampler": make_sampler(temp, top_p=args.top_p, min_p=args.min_p, top_k=top_k),
        "logits_processors": make_logits_processors(repetition_penalty=args.repetition_penalty),
        "seed": args.seed,
        "speculate": args.speculate,
    }
