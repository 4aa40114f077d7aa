"""The tokenizer files of a checkpoint: reading them, checking that they agree, writing them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from ..errors import CheckpointError
from . import sentencepiece_model, tiktoken_model
from .tiktoken_model import added_table

if TYPE_CHECKING:
    from .wrapper import KDATokenizer

JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
# Names whose tokens end a turn or a sequence, wherever the vocabulary has them.
END_NAMES = ("[EOS]", "<|im_end|>")
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
# Settings that would run code, or that belong to another tokenizer class.
DROPPED = {"auto_map", "tokenizer_class", "chat_template", "sp_model_kwargs", "tokenizer_file"}


@dataclass
class TokenizerFiles:
    """A tokenizer read from a folder, its settings, and where it came from."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    origin: str  # the file it was built from
    chat_template: str | list | dict | None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} if there is no such file; CheckpointError if it is damaged."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: not a JSON object")
    return content


def read_tokenizer(folder: Path, model_config: dict[str, Any]) -> TokenizerFiles | None:
    """The tokenizer of a folder, or None if it has none.

    tiktoken.model is preferred to tokenizer.json: generic converters split Kimi's text wrongly.
    Raises CheckpointError: damaged files, or ids that disagree between the files.
    """
    config = read_json(folder / CONFIG)
    table = added_table(config)
    if (path := folder / tiktoken_model.FILE).is_file():
        tokenizer = tiktoken_model.build(path, table, model_config.get("vocab_size"))
    elif (path := folder / JSON).is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower kind
            raise CheckpointError(f"{path} is damaged: {error}") from error
    elif (path := folder / sentencepiece_model.FILE).is_file():
        tokenizer = sentencepiece_model.build(path, config)
    else:
        return None
    _add_named(tokenizer, table, config)
    files = TokenizerFiles(tokenizer, config, path.name, read_template(folder, config))
    check_ids(files, model_config, read_json(folder / "generation_config.json"))
    return files


def read_template(folder: Path, config: dict[str, Any]) -> str | list | dict | None:
    """The chat template: of chat_template.jinja, else of tokenizer_config.json."""
    path = folder / TEMPLATE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    template = config.get("chat_template")
    if template is not None and not isinstance(template, str | list | dict):
        raise CheckpointError(f"{CONFIG}: chat_template is damaged: {template!r}")
    named_templates(template)
    return template


def named_templates(template: str | list | dict | None) -> str | dict | None:
    """A chat template as transformers takes it; a list of named ones becomes a table."""
    if not isinstance(template, list):
        return template
    try:
        return {entry["name"]: entry["template"] for entry in template}
    except (TypeError, KeyError):
        raise CheckpointError(f"{CONFIG}: chat_template is damaged") from None


def token_name(entry: Any) -> str | None:
    """The text of a named token, given as a string or as a table with its content."""
    name = entry.get("content") if isinstance(entry, dict) else entry
    if name is not None and not isinstance(name, str):
        raise CheckpointError(f"{CONFIG}: a token's name must be text, got {name!r}")
    return name


def _add_named(tokenizer: Tokenizer, table: dict[int, AddedToken], config: dict[str, Any]) -> None:
    """Add what ``added_tokens_decoder`` lists beyond the tokenizer's own vocabulary, id by id."""
    known = tokenizer.get_added_tokens_decoder()
    for index, token in sorted(table.items()):
        if tokenizer.token_to_id(token.content) is None and index == tokenizer.get_vocab_size():
            tokenizer.add_tokens([token])
        found = tokenizer.token_to_id(token.content)
        if found != index:
            raise CheckpointError(
                f"the tokenizer's ids disagree: {token.content} is {found} in the vocabulary and "
                f"{index} in {CONFIG}; get the checkpoint's own files"
            )
        if index not in known:
            tokenizer.add_tokens([token])
    for key in NAMED:
        name = token_name(config.get(key))
        if name is not None and tokenizer.token_to_id(name) is None:
            raise CheckpointError(f"{CONFIG}: {key} {name} has no id in the vocabulary")


def check_ids(
    files: TokenizerFiles, model_config: dict[str, Any], generation: dict[str, Any]
) -> None:
    """Raise CheckpointError where control ids are not those that the model's configs name.

    Renumbered copies are in circulation; with them a model never stops, or writes nonsense.
    """
    tokenizer = files.tokenizer
    control = tokenizer.get_added_tokens_decoder()
    size = model_config.get("vocab_size")
    if isinstance(size, int) and tokenizer.get_vocab_size() > size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the model {size}; "
            "they do not belong together"
        )
    for where, config in (("config.json", model_config), ("generation_config.json", generation)):
        for index in as_ids(config.get("eos_token_id")):
            if index not in control:
                raise CheckpointError(
                    f"the tokenizer's ids disagree: {where} ends at id {index}, which is "
                    f"{tokenizer.id_to_token(index)!r} and not a control token"
                )
        # a wrong padding id is common and harmless; the first token matters
        name, bos = token_name(files.config.get("bos_token")), config.get("bos_token_id")
        if name is None or not isinstance(bos, int):
            continue
        if (found := tokenizer.token_to_id(name)) != bos:
            raise CheckpointError(
                f"the tokenizer's ids disagree: bos_token {name} is {found}, {where} says {bos}"
            )


def as_ids(value: Any) -> list[int]:
    """An id, a list of ids or nothing, as a list."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [v for v in values if isinstance(v, bool) or not isinstance(v, int)]:
        raise CheckpointError(f"eos_token_id must be an id or a list of ids, got {wrong[0]!r}")
    return values


def end_ids(
    files: TokenizerFiles | None, model_config: dict[str, Any], generation: dict[str, Any]
) -> list[int]:
    """All ids that end a reply: of both configs, of the tokenizer's eos_token, and END_NAMES."""
    ids = [*as_ids(generation.get("eos_token_id")), *as_ids(model_config.get("eos_token_id"))]
    if files is not None:
        names = (token_name(files.config.get("eos_token")), *END_NAMES)
        control = files.tokenizer.get_added_tokens_decoder()
        found = (files.tokenizer.token_to_id(name) for name in names if name is not None)
        ids += [index for index in found if index in control]
    return list(dict.fromkeys(ids))


def load_tokenizer(path: str | Path) -> "KDATokenizer":
    """Load the tokenizer of a checkpoint folder, without running any code that it contains.

    Takes tokenizer.json, tiktoken.model and sentencepiece's tokenizer.model. The result can be used
    wherever mlx-lm expects its TokenizerWrapper. Its ``eos_token_ids`` are those of config.json,
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
    # transformers is slow to import, and a conversion does not need it
    from .wrapper import KDATokenizer

    return KDATokenizer(files, folder, model_config)


def write_tokenizer(files: TokenizerFiles, out: Path, model_config: dict[str, Any]) -> str:
    """Write tokenizer.json, tokenizer_config.json and the chat template into the folder ``out``.

    What is written loads in transformers' AutoTokenizer without remote code. Returns a line saying
    what was built from what.
    """
    files.tokenizer.save(str(out / JSON))
    settings = {key: value for key, value in files.config.items() if key not in DROPPED}
    added = sorted(files.tokenizer.get_added_tokens_decoder().items())
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(index): token.__getstate__() for index, token in added},
    }
    context = model_config.get("model_max_length") or model_config.get("max_position_embeddings")
    if context:
        settings["model_max_length"] = context
    if isinstance(files.chat_template, str):
        (out / TEMPLATE).write_text(files.chat_template, encoding="utf-8")
    elif files.chat_template is not None:
        settings["chat_template"] = files.chat_template
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (out / CONFIG).write_text(text, encoding="utf-8")
    return f"{files.origin} -> {JSON}, {files.tokenizer.get_vocab_size()} tokens"
