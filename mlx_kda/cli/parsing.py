"""How options are read: the parser's manners, and argparse types that refuse in one line."""

import argparse
import difflib
import math
import re
from collections.abc import Callable
from typing import Any

from ..cache.policy import Policy
from ..errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse with examples left as they are and a mistake told in one line."""

    def __init__(self, **kwargs: Any):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """argparse's, but what a command does not know is told by it, and not by the program."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown[0])}")
        return namespace, unknown

    def _meant(self, word: str) -> str:
        """What a wrong option, or a word too many, may have been meant to be."""
        if not word.startswith("-") and "--prompt" in self._option_string_actions:
            return "; a prompt is given with --prompt"
        near = difflib.get_close_matches(word.partition("=")[0], self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near and word.startswith("--") else ""

    def error(self, message: str) -> None:
        line = " ".join(message.split())  # a value may hold line breaks, and be long
        line = re.sub(r"\S{61,}", lambda found: found[0][:40] + "...", line)
        self.exit(2, f"{self.prog}: {line} (see {self.prog} --help)\n")


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """An argparse type: an int or a finite float in [low, high]."""
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


def one_of(*values: int) -> Callable[[str], int]:
    """An argparse type: one of some whole numbers."""

    def parse(text: str) -> int:
        if text not in map(str, values):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {', '.join(map(str, values))}"
            )
        return int(text)

    return parse


def name(text: str) -> str:
    """An argparse type: the name of a file or folder; an unset variable of a shell is none."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def numbers(text: str) -> list[int]:
    """An argparse type: whole numbers of 1 or more, as in 1,512,2048."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,512,2048")
    return values


def policy(text: str) -> Policy:
    """An argparse type: a cache policy by its name."""
    try:
        return Policy.parse(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def text(value: str) -> str:
    """An argparse type: text in which every character can be encoded.

    Bytes of an argument that are not UTF-8 arrive as lone surrogates, which no tokenizer takes.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("this is not text in UTF-8") from None
    return value
