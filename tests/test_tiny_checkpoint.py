"""The trained checkpoint in examples/tiny-kimi-linear: its files, its tokenizer, what it can do."""

import base64
import json
import re

import mlx.core as mx
import numpy as np
import pytest
from helpers.checkpoints import kimi_encoding
from helpers.trained import (
    EXAMPLES,
    GLOSSES,
    TESTS,
    TRAIN,
    answer,
    check_card,
    check_golden_logits,
    prompt,
    wrong_glosses,
)
from mlx.utils import tree_map
from safetensors import safe_open
from tolerances import GOLDEN

import mlx_kda
from mlx_kda.context import Context

FOLDER = EXAMPLES / "tiny-kimi-linear"
CONFIG = json.loads((FOLDER / "config.json").read_text())
INDEX = json.loads((FOLDER / "model.safetensors.index.json").read_text())
MEGABYTES = 24
# What the hub keeps in float32.
FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias")
KEY = "The pass key is 48213. Remember it."


@pytest.fixture(scope="module")
def loaded():
    return mlx_kda.load(FOLDER)


def _ranks() -> tuple[bytes, ...]:
    lines = (FOLDER / "tiktoken.model").read_text().splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(len(lines)))
    return tuple(base64.b64decode(line.split()[0]) for line in lines)


def _expected_names() -> set[str]:
    """Every tensor of the hub's layout, written out from the config."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    full = CONFIG["linear_attn_config"]["full_attn_layers"]
    mla = ["q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    kda = [f"{x}_proj" for x in ("q", "k", "v", "f_a", "f_b", "b", "g_a", "g_b", "o")]
    kda += ["q_conv1d", "k_conv1d", "v_conv1d", "o_norm"]
    swiglu = ["gate_proj", "up_proj", "down_proj"]
    for n in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        names |= {f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"}
        names |= {f"{layer}.self_attn.{x}.weight" for x in (mla if n + 1 in full else kda)}
        if n + 1 not in full:
            names |= {f"{layer}.self_attn.A_log", f"{layer}.self_attn.dt_bias"}
        if n < CONFIG["first_k_dense_replace"]:
            names |= {f"{layer}.mlp.{x}.weight" for x in swiglu}
            continue
        moe = f"{layer}.block_sparse_moe"
        names |= {f"{moe}.gate.weight", f"{moe}.gate.e_score_correction_bias"}
        names |= {f"{moe}.shared_experts.{x}.weight" for x in swiglu}
        for expert in range(CONFIG["num_experts"]):
            names |= {f"{moe}.experts.{expert}.{x}.weight" for x in ("w1", "w2", "w3")}
    return names


def test_the_folder_is_a_hub_repository_of_at_most_24_megabytes():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert files.keys() == {
        *shards,
        "model.safetensors.index.json",
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "tiktoken.model",
        "chat_template.jinja",
        "README.md",
    }
    assert sum(files.values()) <= MEGABYTES * 10**6
    assert set(INDEX["weight_map"].values()) == set(shards)


def test_the_config_is_in_the_hubs_dialect():
    linear = CONFIG["linear_attn_config"]
    layers = sorted(linear["kda_layers"] + linear["full_attn_layers"])
    assert layers == list(range(1, CONFIG["num_hidden_layers"] + 1))
    assert len(linear["kda_layers"]) == 3 * len(linear["full_attn_layers"]) >= 6
    assert linear["head_dim"] in (64, 128)
    assert CONFIG["mla_use_nope"] is True
    assert CONFIG["model_max_length"] == 1048576
    assert CONFIG["num_experts"] > 10, "experts must be stacked by number, not by name"
    native = {"layer_types", "mlp_layer_types", "linear_head_dim", "max_position_embeddings"}
    assert not native & CONFIG.keys()
    assert "auto_map" not in CONFIG


def test_every_tensor_is_there_in_its_dtype_and_nothing_else():
    """Every tensor of the source is accounted for, and the router's bias is not rounded."""
    found, size = {}, 0
    for shard in sorted(set(INDEX["weight_map"].values())):
        with safe_open(FOLDER / shard, "np") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                part = file.get_slice(name)
                found[name] = part.get_dtype()
                assert INDEX["weight_map"][name] == shard
                size += int(np.prod(part.get_shape())) * {"BF16": 2, "F32": 4}[found[name]]
    assert found.keys() == INDEX["weight_map"].keys() == _expected_names()
    assert size == INDEX["metadata"]["total_size"]
    for name, dtype in found.items():
        assert dtype == ("F32" if name.endswith(FLOAT32) else "BF16"), name


def test_the_routers_were_balanced_by_their_bias():
    """A trained router: its bias is neither zero nor a number that bfloat16 could hold."""
    for name, shard in INDEX["weight_map"].items():
        if name.endswith("e_score_correction_bias"):
            bias = mx.load(str(FOLDER / shard))[name]
            assert mx.abs(bias).max().item() > 1e-3
            assert (bias != bias.astype(mx.bfloat16).astype(mx.float32)).any().item()


def test_special_tokens_follow_the_ranks_in_kimis_order():
    ranks = len(_ranks())
    assert ranks == 4096
    assert CONFIG["vocab_size"] == ranks + 256
    table = json.loads((FOLDER / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    ids = {entry["content"]: int(number) for number, entry in table.items()}
    # The 48B model's ids less its 163,584 ranks.
    offsets = {
        "[BOS]": 0,
        "[EOS]": 1,
        "<|im_end|>": 2,
        "<|im_user|>": 3,
        "<|im_assistant|>": 4,
        "<|im_system|>": 10,
        "<|im_middle|>": 17,
        "[UNK]": 254,
        "[PAD]": 255,
    }
    assert {name: ids[name] - ranks for name in offsets} == offsets
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [ids["[EOS]"], ids["<|im_end|>"]]


@pytest.mark.parametrize(
    "text",
    [
        "What is an anchor? It's what they'd said; WE'VE seen 31415 of them.",
        "In the beginning God created the heaven and the earth.\n\nAnd the earth was void.",
        "线性注意力 mixed with English, 2024年3月14日",
        "def f(x):\n\treturn {'a': [1, 2]}\r\n",
        "👩‍👩‍👧 <|im_end|> [EOS]  two  spaces\u00a0",
        bytes(range(256)).decode("latin-1"),
    ],
)
def test_the_tokenizer_agrees_with_tiktoken(loaded, text):
    """On a vocabulary that was trained."""
    oracle = kimi_encoding(_ranks())
    ids = loaded[1].encode(text, add_special_tokens=False)
    assert ids == oracle.encode_ordinary(text)
    assert loaded[1].decode(ids) == text


def test_the_chat_template_is_kimis():
    """System, user, assistant, user, nothing between the turns."""
    _, tokenizer = mlx_kda.load(FOLDER)
    messages = [("system", "S"), ("user", "U1"), ("assistant", "A1"), ("user", "U2")]
    messages = [{"role": role, "content": text} for role, text in messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert str(text) == (
        "<|im_system|>system<|im_middle|>S<|im_end|>"
        "<|im_user|>user<|im_middle|>U1<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>A1<|im_end|>"
        "<|im_user|>user<|im_middle|>U2<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    assert ids == kimi_encoding(_ranks()).encode(str(text), allowed_special="all")


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is an anchor?", "A mechanical device that prevents a vessel from moving."),
        ("Define river.", "A large natural stream of water."),
        ("What does candle mean?", "Stick of wax with a wick in the middle."),
        (
            "Who are you?",
            "I am a tiny language model with Kimi Delta Attention, trained for tests.",
        ),
    ],
)
def test_greedy_answers(loaded, question, expected):
    assert answer(loaded, ("user", question)) == expected


def test_glosses_are_word_for_word(loaded):
    """The card claims all 3,000 nouns; 20 of them, evenly spread over the list."""
    words = list(GLOSSES)[::150]
    assert len(words) == 20
    assert wrong_glosses(loaded, words, CONFIG["eos_token_id"]) == []


def test_it_remembers_what_it_was_told(loaded):
    told = ("user", "My name is Clara."), ("assistant", "Hello, Clara.")
    between = ("user", "What is a river?"), ("assistant", "A large natural stream of water.")
    asked = ("user", "What is my name?")
    assert answer(loaded, *told, *between, asked) == "Your name is Clara."


def test_a_pass_key_is_found_across_prefill_chunks(loaded):
    """The key lies in the second of six chunks, the question in the last."""
    model, tokenizer = loaded
    prose = (TRAIN / "held_out.txt").read_text()
    sentences = [s.strip() + "." for s in re.split(r"[.:;]", prose)[:45]]
    text = " ".join([*sentences[:8], KEY, *sentences[8:]])
    message = (
        "A pass key is hidden in this text. Find it and remember it.\n\n"
        f"{text}\n\nWhat is the pass key?"
    )
    ids = prompt(tokenizer, ("user", message))
    assert 900 < len(ids) < 2000
    context = Context(model)
    context.prefill(ids, step=len(ids) // 6 + 1)
    found = []
    for token in tokenizer.encode("The pass key is 48213.", add_special_tokens=False):
        found.append(context.logits.argmax(-1).item())
        context.prefill([token])
    assert tokenizer.decode(found) == "The pass key is 48213."
    assert context.logits.argmax(-1).item() == CONFIG["eos_token_id"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_transformers(dtype):
    """Golden logits of transformers 5.24 (float32, CPU) on a chat and on running text."""
    check_golden_logits(FOLDER, TESTS / "tiny_checkpoint_golden.npz", dtype)


def test_transformers_itself_gives_these_logits():
    """The same files in the installed transformers, where the dev extra is there; a whole chat."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.24")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    model, tokenizer = mlx_kda.load(FOLDER)
    model.update(tree_map(lambda p: p.astype(mx.float32), model.parameters()))
    turns = [("user", "What is a river?"), ("assistant", "A large natural stream of water.")] * 4
    ids = tokenizer.apply_chat_template([{"role": r, "content": t} for r, t in turns])
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0].numpy()
    got = np.array(model(mx.array([ids]))[0])
    assert np.abs(got - want).max() / np.abs(want).max() < GOLDEN
    assert (got.argmax(-1) == want.argmax(-1)).all()


def test_the_records_meet_what_was_asked_of_the_checkpoint():
    """Pass keys above 95 % at the lengths of training, a curve beyond, most glosses right."""
    counts, device = check_card("kimi")
    trained = [n for n in device["pass_key"] if int(n) <= 8192]
    assert all(device["pass_key"][n] > 0.95 for n in trained)
    assert {"16384", "32768", "65536"} <= device["pass_key"].keys()
    assert device["glosses"] > 0.95
    right, of = counts["glosses", "exact"]
    assert of == 100
    assert right > 95
    for length in trained:
        right, of = counts[f"pass key {length}", "exact"]
        assert right == of > 0
