"""sentencepiece models (llama-style), against sentencepiece itself."""

import pytest
import sentencepiece
from helpers.checkpoints import CORPUS, write_json
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_kda.errors import CheckpointError
from mlx_kda.tokenizer import load_tokenizer, read_tokenizer, write_tokenizer

LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
KINDS = {
    "bpe, as llama has it": LLAMA,
    "bpe with words of its own": {**LLAMA, "user_defined_symbols": ["def", "matrix"]},
    "unigram, normalised": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "bpe without a dummy prefix": {**LLAMA, "add_dummy_prefix": False},
}
SAMPLES = [
    "The state is a matrix, and the gate forgets.",
    "def step(state): return  state  # two  spaces",
    "中文和English混排 Быстрая лиса",
    "😀 é ﬁ ½",
    " leading and trailing ",
    "</s><s><unk> <0x41>",
    "",
]


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    """A trained model's folder, sentencepiece's processor for it, and the tokenizer."""
    folder = tmp_path_factory.mktemp("spm")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.split("\n") * 5),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=600 if KINDS[request.param]["model_type"] == "bpe" else 400,
        hard_vocab_limit=False,
        character_coverage=0.98,
        minloglevel=2,
        **KINDS[request.param],
    )
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    oracle = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    return request.param, folder, oracle, load_tokenizer(folder)


@pytest.mark.parametrize("text", SAMPLES)
def test_samples_give_sentencepieces_ids(case, text):
    """Ids as sentencepiece gives them, BOS before; spelled control tokens stay text."""
    name, _, oracle, tokenizer = case
    if "unigram" in name and "<0x41>" in text:
        text = text.replace("<0x41>", "")
    assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text)
    assert tokenizer.encode(text) == [oracle.bos_id(), *oracle.encode(text)]


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="abcdefmatrix  THE.,'\n\t中文д😀é<>/s"))
def test_any_text_gives_sentencepieces_ids(case, text):
    name, _, oracle, tokenizer = case
    assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text)
    if "bpe" in name:
        assert tokenizer.decode(oracle.encode(text)) == oracle.decode(oracle.encode(text))


def test_streamed_text_is_the_decoded_text(case):
    name, _, oracle, tokenizer = case
    for text in SAMPLES[:4]:
        detokenizer = tokenizer.detokenizer
        ids = oracle.encode(text)
        pieces = []
        for token in [oracle.bos_id(), *ids, oracle.eos_id()]:
            detokenizer.add_token(token)
            pieces.append(detokenizer.last_segment)
        detokenizer.finalize()
        pieces.append(detokenizer.last_segment)
        if "bpe" in name:
            assert "".join(pieces) == oracle.decode(ids) == text
        assert "\ufffd" not in "".join(pieces)


def test_it_ends_at_its_end_token(case):
    _, _, oracle, tokenizer = case
    assert tokenizer.eos_token_ids == {oracle.eos_id()}


def test_what_is_written_loads_in_transformers_and_mlx_lm(case, tmp_path):
    from mlx_lm.tokenizer_utils import load
    from transformers import AutoTokenizer

    _, folder, oracle, _ = case
    write_tokenizer(read_tokenizer(folder, {}), tmp_path, {})
    write_json(tmp_path / "config.json", {"model_type": "kda"})
    auto, stock = AutoTokenizer.from_pretrained(str(tmp_path)), load(tmp_path)
    for text in SAMPLES[:5]:
        assert auto.encode(text) == [oracle.bos_id(), *oracle.encode(text)]
        assert stock.encode(text) == [oracle.bos_id(), *oracle.encode(text)]
    assert load_tokenizer(tmp_path).encode("a b") == [oracle.bos_id(), *oracle.encode("a b")]


def test_a_damaged_model_is_refused(case, tmp_path):
    _, folder, _, _ = case
    data = (folder / "tokenizer.model").read_bytes()
    for broken in (data[: len(data) // 2], b"", b"no model"):
        (tmp_path / "tokenizer.model").write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"tokenizer\.model is damaged"):
            load_tokenizer(tmp_path)
