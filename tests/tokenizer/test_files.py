"""Tokenizer files that are missing, damaged, renumbered or hostile, and streaming text."""

import json
import pickle

import pytest
from helpers.checkpoints import (
    edit_json,
    kimi_encoding,
    kimi_ranks,
    slot_ids,
    write_json,
    write_kimi_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_kda.errors import CheckpointError
from mlx_kda.tokenizer import load_tokenizer, read_tokenizer, write_tokenizer

RANKS = kimi_ranks()
ORACLE = kimi_encoding(RANKS)
ID = slot_ids(len(RANKS))


@pytest.fixture
def folder(tmp_path):
    return write_kimi_tokenizer(tmp_path / "kimi")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_kimi_tokenizer(tmp_path_factory.mktemp("files")))


def refused(folder, *words: str) -> None:
    """Loading fails with one line that holds all the words."""
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def as_converted(folder, out):
    """The tokenizer files that a conversion of the folder writes."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    write_tokenizer(read_tokenizer(folder, config), out, config)
    for name in ("config.json", "generation_config.json"):
        (out / name).write_text((folder / name).read_text())
    return out


# --- stopping


def test_stops_at_both_end_tokens_although_the_configs_name_one(folder):
    """The configs name <|im_end|>, the tokenizer [EOS]; either one ends a reply."""
    assert load_tokenizer(folder).eos_token_ids == {ID["[EOS]"], ID["<|im_end|>"]}
    edit_json(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(folder).eos_token_ids == {ID["[EOS]"], ID["<|im_end|>"]}
    write_json(folder / "generation_config.json", {"eos_token_id": [ID["[EOS]"], ID["[PAD]"]]})
    assert load_tokenizer(folder).eos_token_ids == {
        ID["[EOS]"],
        ID["<|im_end|>"],
        ID["[PAD]"],
    }


def swap(folder, first: str, second: str) -> None:
    """Exchange the ids of two control tokens in tokenizer_config.json."""
    table = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    table[str(ID[first])], table[str(ID[second])] = table[str(ID[second])], table[str(ID[first])]
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=table)


def test_renumbered_control_tokens_are_refused(folder, tmp_path):
    """Ids that disagree between vocabulary, token table and configs, each way."""
    converted = as_converted(folder, tmp_path / "converted")
    load_tokenizer(converted)

    swap(converted, "<|im_end|>", "<|im_user|>")
    refused(converted, "ids disagree", "tokenizer_config.json")

    swap(folder, "[BOS]", "[EOS]")
    refused(folder, "ids disagree", "[BOS]", "config.json")


def test_tokens_outside_the_slots_are_refused(folder):
    """A file renumbered from 0, or one whose ranks were cut short."""
    table = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    moved = {str(int(i) - 1): entry for i, entry in table.items()}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=moved)
    refused(folder, "ids disagree", "[BOS]")

    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=table)
    lines = (folder / "tiktoken.model").read_bytes().splitlines(keepends=True)
    (folder / "tiktoken.model").write_bytes(b"".join(lines[:-1]))
    refused(folder, "ids disagree", "[PAD]")


def test_an_end_id_that_is_an_ordinary_word_is_refused(folder):
    """The model's config ends at an id that this vocabulary gives to a word."""
    edit_json(folder / "config.json", eos_token_id=300)
    refused(folder, "ids disagree", "config.json", "300")
    edit_json(folder / "config.json", eos_token_id=ID["[EOS]"])
    write_json(folder / "generation_config.json", {"eos_token_id": [ID["[EOS]"], 10**6]})
    refused(folder, "ids disagree", "generation_config.json", "1000000")


def test_a_careless_padding_id_is_no_reason_to_refuse(folder):
    edit_json(folder / "config.json", pad_token_id=0)
    load_tokenizer(folder)


@pytest.mark.parametrize("value", ["163586", [["x"]], True, 2.5, {"id": 1}])
def test_an_end_id_that_is_no_id_is_refused(folder, value):
    for name in ("config.json", "generation_config.json"):
        before = (folder / name).read_text()
        edit_json(folder / name, eos_token_id=value)
        refused(folder, "eos_token_id")
        (folder / name).write_text(before)


def test_a_tokenizer_larger_than_the_model_is_refused(folder, tmp_path):
    converted = as_converted(folder, tmp_path / "converted")
    edit_json(converted / "config.json", vocab_size=len(RANKS) + 255)
    refused(converted, "do not belong together")


# --- streaming


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(RANKS) + 255), max_size=40))
def test_streamed_text_is_the_decoded_text(tokenizer, ids):
    """Any ids, one at a time: the pieces make up the whole, and no control token is in them."""
    detokenizer = tokenizer.detokenizer
    pieces = []
    for token in ids:
        detokenizer.add_token(token)
        pieces.append(detokenizer.last_segment)
    detokenizer.finalize()
    pieces.append(detokenizer.last_segment)
    hidden = set(tokenizer.all_special_ids)
    expected = tokenizer.decode([i for i in ids if i not in hidden])
    assert "".join(pieces) == detokenizer.text == expected
    assert detokenizer.tokens == ids


def test_two_streams_do_not_mix(tokenizer):
    """Requests are detokenized side by side, each with its own state."""
    first, second = tokenizer.detokenizer, tokenizer.detokenizer
    first.add_token(ORACLE.encode_single_token(b"a"))
    second.add_token(ORACLE.encode_single_token(b"b"))
    assert (first.text, second.text) == ("a", "b")
    first.reset()
    assert (first.text, first.last_segment, second.text) == ("", "", "b")


def test_mlx_lm_generates_with_it(tiny_mlx):
    """Stock mlx-lm's model and generator with this tokenizer: same prompt ids, same text."""
    import mlx_lm
    from mlx_lm.utils import load_model

    model, _ = load_model(tiny_mlx)
    tokenizer = load_tokenizer(tiny_mlx)
    chat = [{"role": "user", "content": "the thing <|im_end|>"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    pieces = list(mlx_lm.stream_generate(model, tokenizer, text, max_tokens=12))
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert pieces[0].prompt_tokens == len(ids)
    # mlx-lm shows no stop token; control tokens that are none give no text here
    tokens = [piece.token for piece in pieces if piece.finish_reason != "stop"]
    shown = [t for t in tokens if t not in tokenizer.all_special_ids]
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(shown)


# --- files that are missing or damaged


def test_missing_files_are_named(folder, tmp_path):
    refused(tmp_path / "nowhere", "no such folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no tokenizer", "tokenizer.json", "tiktoken.model")
    (folder / "tokenizer_config.json").unlink()
    refused(folder, "added_tokens_decoder")


@pytest.mark.parametrize(
    "name",
    ["tiktoken.model", "tokenizer_config.json", "config.json", "generation_config.json"],
)
def test_truncated_files_are_named(folder, name):
    """Every file cut in the middle of a line."""
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2 + 1].rstrip(b"=\n") + b"=")
    refused(folder, name)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"QQ== x", "line 3"),
        (b"QQ==", "line 3"),
        (b"*** 2", "line 3"),
        (b"QQ== 2 2", "line 3"),
        (b"QUFBQUFBQUE= 5", "ranks"),
        (b"QQ== 900000", "ranks"),
        (b"QUFBQUFBQUE= 2", "single bytes"),
    ],
)
def test_damaged_ranks_are_named(folder, line, word):
    lines = (folder / "tiktoken.model").read_bytes().splitlines()
    lines[2] = line
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    refused(folder, "tiktoken.model", word)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eos_token": "<eos>"}, ("eos_token", "<eos>", "no id")),
        ({"bos_token": 5}, ("tokenizer_config.json", "5")),
        ({"eos_token": {"content": []}}, ("tokenizer_config.json", "[]")),
        ({"chat_template": 5}, ("chat_template", "5")),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, ("added_tokens_decoder", "'x'")),
        ({"added_tokens_decoder": {"1010": {"name": "a"}}}, ("added_tokens_decoder", "'1010'")),
        ({"added_tokens_decoder": {"1010": 7}}, ("added_tokens_decoder", "'1010'")),
        (
            {"added_tokens_decoder": {"800": {"content": "a"}, "801": {"content": "a"}}},
            ("more than one id",),
        ),
    ],
)
def test_a_damaged_token_table_is_named(folder, changes, words):
    edit_json(folder / "tokenizer_config.json", **changes)
    refused(folder, *words)


def test_a_damaged_tokenizer_json_is_named(folder, tmp_path):
    converted = as_converted(folder, tmp_path / "converted")
    data = (converted / "tokenizer.json").read_bytes()
    for broken in (data[:-100], b"", b"[]", b'{"model": 1}', b"\xff\xfe"):
        (converted / "tokenizer.json").write_bytes(broken)
        refused(converted, "tokenizer.json", "damaged")


# --- nothing in the folder is run


class Bomb:
    """Unpickling this would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_nothing_in_the_folder_is_executed(folder, tmp_path):
    """Python files, auto_map, tokenizer classes and pickles are passed by."""
    mark = tmp_path / "executed"
    code = f"open({str(mark)!r}, 'w')\nclass TikTokenTokenizer: pass\n"
    for name in ("tokenization_kimi.py", "modeling_kimi.py", "configuration_kimi.py", "setup.py"):
        (folder / name).write_text(code)
    (folder / "sitecustomize.py").write_text(code)
    for name in ("pytorch_model.bin", "tokenizer.pkl", "added_tokens.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    auto = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    edit_json(folder / "config.json", auto_map=auto, model_file="modeling_kimi.py")
    edit_json(folder / "tokenizer_config.json", auto_map=auto, trust_remote_code=True)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("abc") == ORACLE.encode("abc")
    converted = as_converted(folder, tmp_path / "converted")
    assert sorted(path.suffix for path in converted.iterdir()) == [".jinja", *[".json"] * 4]
    load_tokenizer(converted)
    assert not mark.exists()
