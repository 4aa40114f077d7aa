"""The tokenizer's share of a conversion."""

import json
from pathlib import Path
from typing import Any

from .files import CONFIG, JSON, TEMPLATE, TokenizerFiles, written_settings


def write_tokenizer(files: TokenizerFiles, out: Path, model_config: dict[str, Any]) -> str:
    """Write tokenizer.json, tokenizer_config.json and the chat template into the folder `out`.

    What is written loads in transformers' AutoTokenizer without remote code. Returns a line saying
    what was built from what.
    """
    files.tokenizer.save(str(out / JSON))
    settings = written_settings(files, model_config)
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (out / CONFIG).write_text(text, encoding="utf-8")
    if isinstance(files.chat_template, str):
        (out / TEMPLATE).write_text(files.chat_template, encoding="utf-8")
    return f"{files.origin} -> {JSON}, {files.tokenizer.get_vocab_size()} tokens"
