"""What ``mlx-kda demo`` asks of the small trained checkpoint, and where that checkpoint is."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import UserError
from .files import cache_dir

CHECKPOINT = Path("examples") / "tiny-kimi-linear"
BITS = 4
QUESTIONS = ("What is an anchor?", "What is a bridge?", "Who are you?")
OPENING = "Blessed is the man that"
KEY = "71432"
KEY_QUESTION = "What is the pass key?"

# Lengths without a common divisor: a sentence comes back after 13 * 11 * 9 * 7 others.
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
    """The folder named, else examples/tiny-kimi-linear here or in the source checkout.

    The checkpoint is not part of an installed wheel, which is why it may be absent. Raises
    UserError telling where to get it; ``command`` is the one that names another.
    """
    if given is not None:
        return Path(given)
    checkout = Path(__file__).resolve().parent.parent
    for base in (Path(), checkout):
        if (base / CHECKPOINT / "config.json").is_file():
            return base / CHECKPOINT
    raise UserError(
        f"the small checkpoint {CHECKPOINT} is not here: run this in a clone of the repository, "
        f"or name a checkpoint: mlx-kda {command}"
    )


def working_dtype() -> str | None:
    """The dtype to convert what is not quantised to; None: as in the source.

    MLX's CPU build is several times slower at 16-bit matrices than at those of float32.
    """
    import mlx.core as mx

    return "float32" if mx.default_device() == mx.cpu else None


def sentence(number: int) -> str:
    """A sentence of plain English for a haystack; the first 9,009 are all different."""
    parts = (words[number % len(words)] for words in (_WHO, _DID, _WHAT, _WHERE))
    return " ".join(parts) + "."


def haystack(tokenizer: Any, tokens: int) -> str:
    """A user's message of about ``tokens`` tokens with the key two fifths in, asked for at its end.

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
    """A folder that is gone after the block, however that ends."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="mlx-kda-demo-")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"no temporary folder can be made: {reason}; set TMPDIR to one") from None
    with folder as name:
        yield Path(name)


def default_model(say: Callable[[str], None]) -> Path:
    """The small checkpoint in 4 bits, converted into the cache folder the first time.

    It is made anew when the checkpoint or this package's version has changed. Raises UserError
    where there is neither a checkpoint nor what was made of it before, and where the folder cannot
    be written.
    """
    from .convert import convert

    dtype = working_dtype()
    folder = cache_dir() / f"{CHECKPOINT.name}-{BITS}bit-{dtype or 'source'}"
    try:
        source = find_checkpoint(None, "chat MODEL")
    except UserError:
        if (folder / "config.json").is_file():  # only a whole conversion has its name
            return folder
        raise
    if not folder.exists():
        say(f"converting {source} to {BITS} bits, once, into {folder}")
    wish = {"q_bits": BITS, "dtype": dtype}
    try:
        convert(source, folder, **wish, resume=True)
    except UserError:
        # Made from other files or by another version; or a real fault, which comes again.
        convert(source, folder, **wish, overwrite=True)
    return folder
