"""Tokenizers without remote code: built at conversion, loaded where mlx-lm expects its own.

``load_tokenizer`` is loaded on first use: it needs transformers, which a conversion does not.
"""

import importlib
from typing import Any

from .files import end_ids, read_tokenizer, write_tokenizer

__all__ = ["end_ids", "load_tokenizer", "read_tokenizer", "write_tokenizer"]


def __getattr__(name: str) -> Any:
    if name == "load_tokenizer":
        return importlib.import_module(f"{__name__}.wrapper").load_tokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
