"""`load_tokenizer`: a tokenizer for generation from a converted or an original folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError
from .files import read_json, read_tokenizer

if TYPE_CHECKING:
    from .wrapper import KDATokenizer


def load_tokenizer(path: str | Path) -> "KDATokenizer":
    """Load the tokenizer of a checkpoint folder, without running any code that lies in it.

    Takes tokenizer.json, `tiktoken.model` and sentencepiece's `tokenizer.model`. The result stands
    where mlx-lm expects its TokenizerWrapper. Its `eos_token_ids` are those of config.json,
    generation_config.json and tokenizer_config.json, and [EOS] and <|im_end|> where they exist.

    Raises CheckpointError: no folder or no tokenizer, damaged files, control ids that disagree.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    model_config = read_json(folder / "config.json")
    files = read_tokenizer(folder, model_config)
    if files is None:
        raise CheckpointError(
            f"{path} has no tokenizer (tokenizer.json, tiktoken.model or tokenizer.model)"
        )
    # transformers is slow to import; asking for a tokenizer is early enough
    from .wrapper import KDATokenizer

    return KDATokenizer.from_files(files, folder, model_config)
