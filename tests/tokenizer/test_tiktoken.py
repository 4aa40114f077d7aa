"""Kimi's tokenizer built from tiktoken.model, against tiktoken itself."""

import json
import random
import socket
import time

import pytest
from helpers.checkpoints import (
    CORPUS,
    EDGES,
    SLOTS,
    edge_ranks,
    kimi_encoding,
    kimi_ranks,
    slot_ids,
    write_kimi_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_kda.tokenizer import load_tokenizer, read_tokenizer, write_tokenizer
from mlx_kda.tokenizer.tiktoken_model import added_table, build

RANKS = kimi_ranks()
ORACLE = kimi_encoding(RANKS)
SAMPLES = {
    "english": "It's what they'd said; WE'VE seen I'LL say you'RE, don't. HTTPServer fooBar Ünï",
    "chinese": "线性注意力把整个历史压缩成一个矩阵。〇々㐀𠀀",
    "han beside latin": "中文English混排abc中d文 2024年3月14日iPhone15发布",
    "combining marks": "e\u0301cole nai\u0308ve \u0301alone a\u0323\u0302\u0301 שָׁלוֹם हिन्दी กำลัง",
    "scripts": "Быстрая лиса, ΑΒΓ αβγ, مرحبا, 素早い茶色の狐, 빠른 갈색 여우, Ǆ ǅ ǆ ﬁ ŉ",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈 🇫🇷😀 ok",
    "code": "def f(x):\n\tif x == 1:\r\n\t\treturn {'a': [1,2]}\n\n\n    # ÷ 12345.678e-9\n}}}}\n",
    "spaces": "  a   b\u00a0c\u3000d \t \n  \r\n\r\n   e ",
    "contractions": "'s 'S 'T 'Re 'vE 'm 'll 'd x'sx X'SX 'ſ it'ſ中's",
    "control": "<|im_end|><|im_user|>[BOS]<|reserved_token_999|>",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_kimi_tokenizer(tmp_path_factory.mktemp("kimi") / "source")


@pytest.fixture(scope="module")
def written(folder):
    """The folder that a conversion would write, tokenizer files only."""
    out = folder.parent / "written"
    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    write_tokenizer(read_tokenizer(folder, config), out, config)
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


@pytest.fixture(scope="module")
def tokenizer(written):
    return load_tokenizer(written)


def truth(text: str) -> list[int]:
    return ORACLE.encode(text, disallowed_special=())


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_split_and_merge_as_tiktoken_does(tokenizer, name):
    """Scripts, code and emoji give tiktoken's ids and round-trip."""
    text = SAMPLES[name]
    assert tokenizer.encode(text) == truth(text)
    assert tokenizer.decode(truth(text)) == text


def test_long_text_of_many_scripts(tokenizer):
    """The training text, merged deeply, gives tiktoken's ids."""
    ids = tokenizer.encode(CORPUS)
    assert ids == truth(CORPUS)
    assert len(ids) < len(CORPUS.encode()) / 2  # merges did happen
    assert tokenizer.decode(ids) == CORPUS


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_gives_tiktokens_ids(tokenizer, text):
    assert tokenizer.encode(text) == truth(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.fixture(scope="module")
def edge_tokenizer(tmp_path_factory):
    return load_tokenizer(write_kimi_tokenizer(tmp_path_factory.mktemp("edges"), edge_ranks()))


EDGE_ORACLE = kimi_encoding(edge_ranks())


@settings(max_examples=1000, deadline=None)
@given(st.text(alphabet=EDGES))
def test_text_is_split_where_tiktoken_splits_it(edge_tokenizer, text):
    """Any two neighbours would join if no split lay between them, so every split is seen."""
    assert edge_tokenizer.encode(text) == EDGE_ORACLE.encode(text)


def test_pairs_of_characters_are_split_as_tiktoken_does(edge_tokenizer):
    """Every triple of the characters at the pattern's edges, in one text each first character."""
    for first in EDGES:
        for second in EDGES:
            text = "\u0378".join(first + second + third for third in EDGES)
            assert edge_tokenizer.encode(text) == EDGE_ORACLE.encode(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(RANKS) - 1), max_size=30))
def test_any_ids_decode_to_tiktokens_text(tokenizer, ids):
    """Ids in any order, bytes of broken characters among them, give tiktoken's text."""
    assert tokenizer.decode(ids) == ORACLE.decode(ids)


@pytest.mark.parametrize("unit", ["a", "A", "中", " ", "\n", "!", "é", "0", "\u0301", "ab "])
def test_a_run_of_25_000_characters_takes_no_time(tokenizer, unit):
    """One long run must not cost its square: seconds here mean minutes on a large prompt."""
    text = unit * (25_000 // len(unit))
    start = time.process_time()
    ids = tokenizer.encode(text)
    assert time.process_time() - start < 2
    assert ids == truth(text)


def test_merges_of_any_vocabulary_join_as_tiktoken_does(tmp_path):
    """Ranks that no training would give: tokens that rank before their parts, or have none."""
    draw = random.Random(0)
    single = [bytes([value]) for value in range(256)]
    for _ in range(30):
        words = {bytes(draw.choices(b"abc", k=draw.randint(2, 6))) for _ in range(25)}
        tokens = single + sorted(words)
        draw.shuffle(tokens)
        folder = write_kimi_tokenizer(tmp_path, tuple(tokens))
        table = added_table(json.loads((folder / "tokenizer_config.json").read_text()))
        ours, oracle = build(folder / "tiktoken.model", table, None), kimi_encoding(tuple(tokens))
        for _ in range(100):
            text = "".join(draw.choices("abc", k=draw.randint(1, 30)))
            assert ours.encode(text).ids == oracle.encode(text), (tokens, text)


def test_every_slot_has_the_checkpoints_name_and_id(tokenizer):
    """256 slots after the ranks: named ones by added_tokens_decoder, the others reserved."""
    ids = slot_ids(len(RANKS))
    assert len(ids) == 256
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in ids} == ids
    assert len(tokenizer) == len(RANKS) + 256
    text = "a<|im_end|>b<|tool_call_begin|>[PAD]"
    expected = ORACLE.encode(text, allowed_special="all")
    assert tokenizer.encode(text, allow_special=True) == expected
    assert set(ids.values()) - {ids[name] for name, special in SLOTS.values() if not special} == (
        set(tokenizer.all_special_ids)
    )


def test_transformers_loads_it_without_network_or_remote_code(written, tokenizer, monkeypatch):
    """AutoTokenizer reads the written folder alone and agrees with tiktoken."""
    from transformers import AutoTokenizer

    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    auto = AutoTokenizer.from_pretrained(str(written))
    for text in SAMPLES.values():
        assert auto.encode(text) == ORACLE.encode(text, allowed_special="all")
        assert auto.decode(truth(text)) == text
    assert auto.bos_token == "[BOS]"
    assert auto.eos_token == "[EOS]"
    assert auto.pad_token_id == len(RANKS) + 255
    # not the 4,096 of a tool that looks for another key
    assert auto.model_max_length == tokenizer.model_max_length == 1_048_576
    assert "auto_map" not in (written / "tokenizer_config.json").read_text()


def test_the_source_folder_itself_loads_the_same(folder, tokenizer):
    """A checkpoint that was not converted gives the same tokenizer."""
    direct = load_tokenizer(folder)
    for text in SAMPLES.values():
        assert direct.encode(text) == tokenizer.encode(text)
    assert direct.eos_token_ids == tokenizer.eos_token_ids


def test_stock_mlx_lm_loads_it(written, tokenizer):
    """mlx-lm's own loader takes the folder; its ids are ours."""
    from mlx_lm.tokenizer_utils import load

    stock = load(written)
    for text in SAMPLES.values():
        assert stock.encode(text) == tokenizer.encode(text, allow_special=True)
    assert stock.tool_call_start == "<|tool_calls_section_begin|>"


def test_characters_of_all_planes_are_split_as_tiktoken_does(tmp_path):
    """The two regular-expression engines bring their own Unicode tables: a sample of all planes.

    Each character joins any neighbour unless a split lies between them.
    """
    draw = random.Random(1)
    planes = [(0x80, 0x3400), (0xA000, 0xAC00), (0xF900, 0x10000), (0x10000, 0x20000)]
    chars = [chr(draw.randrange(*planes[i % 4])) for i in range(600)] + list("㐀豈𠀀\U000e0100")
    around = ["a", "A", "1", "中", " ", "!", "\n", "'"]
    pieces = [bytes([value]) for value in range(256)]
    for char in ["中", *chars]:
        data = char.encode()
        pieces += [data[:n] for n in range(2, len(data) + 1)]
    pairs = [(x, c) for c in chars for x in around] + [(c, x) for c in chars for x in around]
    ranks = tuple(dict.fromkeys([*pieces, *((a + b).encode() for a, b in pairs)]))
    tokenizer = load_tokenizer(write_kimi_tokenizer(tmp_path, ranks))
    oracle = kimi_encoding(ranks)
    for first, second in pairs:
        assert tokenizer.encode(first + second) == oracle.encode(first + second), (first, second)
