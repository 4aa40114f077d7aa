"""What ``mlx-kda demo`` asks of the small trained checkpoint in examples/."""

from pathlib import Path

from mlx_kda.errors import UserError

CHECKPOINT = Path("examples") / "tiny-kimi-linear"
QUESTIONS = ("What is an anchor?", "What is a bridge?", "Who are you?")
OPENING = "And it came to pass in the days of"


def find_checkpoint(given: str | None) -> Path:
    """The folder named, else examples/tiny-kimi-linear here or in the source checkout.

    The checkpoint is not part of an installed wheel, which is why it may be absent. Raises
    UserError telling where to get it.
    """
    if given is not None:
        return Path(given)
    checkout = Path(__file__).resolve().parent.parent
    for base in (Path(), checkout):
        if (base / CHECKPOINT / "config.json").is_file():
            return base / CHECKPOINT
    raise UserError(
        f"the demo's checkpoint {CHECKPOINT} is not here: run it in a clone of the repository, "
        "or name a checkpoint: mlx-kda demo SRC"
    )
