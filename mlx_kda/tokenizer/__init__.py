"""Tokenizers without remote code: built at conversion, loaded where mlx-lm expects its own."""

from .files import end_ids, load_tokenizer, read_tokenizer, write_tokenizer

__all__ = ["end_ids", "load_tokenizer", "read_tokenizer", "write_tokenizer"]
