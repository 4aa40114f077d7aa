"""The small trained checkpoint, and what ``mlx-kda demo`` asks it."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from .convert import convert
from .errors import UserError
from .files import cache_dir

CHECKPOINT = Path("examples") / "tiny-kimi-linear"
BITS = 4
QUESTIONS = ("What is an anchor?", "What is a bridge?", "Who are you?")
OPENING = "Blessed is the man that"
KEY = "71432"
KEY_QUESTION = "What is the pass key?"

# The lengths have no common divisor: a sentence repeats only after 13 * 11 * 9 * 7 others.
_WHO = (
    "The baker", "A tired horse", "My neighbour", "The old captain", "A stranger", "The teacher",
    "Her brother", "The king", "A small dog", "The widow", "His servant", "The judge", "A child",
)  # fmt: skip
_DID = (
    "carried", "looked at", "walked past", "remembered", "came back for", "asked about", "found",
    "left", "waited beside", "sang of", "slept near",
)  # fmt: skip
_WHAT = (
    "the lamp", "a basket of bread", "the white stone", "an empty boat", "the letter", "a red coat",
    "the broken wheel", "a field of barley", "the door",
)  # fmt: skip
_WHERE = (
    "in the morning", "by the river", "before the harvest", "on the way to the city",
    "behind the house", "after the rain", "with great joy",
)  # fmt: skip


def find_checkpoint(given: str | None, command: str = "demo SRC") -> Path:
    """The given folder, else examples/tiny-kimi-linear here or in the source checkout.

    An installed wheel does not contain the checkpoint. If it is missing, UserError says where to
    get it; ``command`` is the one that takes another.
    """
    if given is not None:
        return Path(given)
    checkout = Path(__file__).resolve().parent.parent
    for base in (Path(), checkout):
        if (base / CHECKPOINT / "config.json").is_file():
            return base / CHECKPOINT
    raise UserError(
        f"the small checkpoint {CHECKPOINT} was not found: run this in a clone of the "
        f"repository, or give a checkpoint: mlx-kda {command}"
    )


def working_dtype() -> str | None:
    """The dtype of the weights that are not quantised; None keeps the source's.

    MLX's CPU build multiplies 16-bit matrices several times more slowly than float32 ones.
    """
    return "float32" if mx.default_device() == mx.cpu else None


def sentence(number: int) -> str:
    """A sentence of plain English; the first 9,009 are all different."""
    parts = (words[number % len(words)] for words in (_WHO, _DID, _WHAT, _WHERE))
    return " ".join(parts) + "."


def haystack(tokenizer: Any, tokens: int) -> str:
    """A message of about ``tokens`` tokens that hides the key and asks for it at the end.

    The wording is that of the training task.
    """
    intro = "A pass key is hidden in this text. Find it and remember it."
    hidden = f"The pass key is {KEY}. Remember it."
    found: list[str] = []
    room = tokens - len(tokenizer.encode(f"{intro} {hidden} {KEY_QUESTION}"))
    while room > 0:
        found.append(sentence(len(found)))
        room -= len(tokenizer.encode(" " + found[-1]))
    found.insert(2 * len(found) // 5, hidden)
    return f"{intro}\n\n{' '.join(found)}\n\n{KEY_QUESTION}"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder that is removed after the block."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="mlx-kda-demo-")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot create a temporary folder ({reason}): set TMPDIR") from None
    with folder as name:
        yield Path(name)


def default_model(log: Callable[[str], None]) -> Path:
    """The small checkpoint in 4 bits, converted into the cache folder the first time.

    It is converted again when the checkpoint or this package's version has changed. Raises
    UserError if there is neither a checkpoint nor an earlier conversion, or if the folder cannot be
    written.
    """
    dtype = working_dtype()
    folder = cache_dir() / f"{CHECKPOINT.name}-{BITS}bit-{dtype or 'source'}"
    try:
        source = find_checkpoint(None, "chat MODEL")
    except UserError:
        if (folder / "config.json").is_file():  # only a complete conversion has this name
            return folder
        raise
    if not folder.exists():
        log(f"converting {source} to {BITS} bits, once, into {folder}")
    recipe: dict[str, Any] = {"q_bits": BITS, "dtype": dtype}
    try:
        convert(source, folder, **recipe, resume=True)
    except UserError:
        # Converted from other files or by another version; or a real fault, which is raised again.
        convert(source, folder, **recipe, overwrite=True)
    return folder
