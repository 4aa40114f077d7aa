"""Source folders for the tests of conversion and tokenizers: Kimi-style tokenizer files and parts.

Weights come from `tiny_checkpoint`; here are tokenizers with the layout of the real ones: ranks
first, then 256 slots of which some are named, at the same places as in Kimi's own files.
"""

import base64
import functools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from mlx_kda.tokenizer.tiktoken_model import byte_texts

# Kimi's split in one line, written down apart from the package's own spelling of it.
PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# place after the ranks -> name, shown (special false) or hidden (special true)
SLOTS = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False),
    12: ("<|tool_calls_section_end|>", False),
    13: ("<|tool_call_begin|>", False),
    14: ("<|tool_call_argument_begin|>", False),
    15: ("<|tool_call_end|>", False),
    17: ("<|im_middle|>", True),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}
NAMED = {"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
TEMPLATE = """{%- for m in messages -%}
{%- if loop.first and m.role != 'system' -%}
<|im_system|>system<|im_middle|>Be brief.<|im_end|>
{%- endif -%}
<|im_{{ m.role if m.role in ('system', 'user', 'assistant') else 'system' }}|>
{{- m.get('name') or m.role }}<|im_middle|>
{%- if m.content is string -%}{{ m.content }}
{%- else -%}{%- for part in m.content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- if m.tool_calls -%}<|tool_calls_section_begin|>
{%- for call in m.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.arguments | tojson -}}
<|tool_call_end|>
{%- endfor -%}<|tool_calls_section_end|>{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
CORPUS = """
The state is a matrix and the gate forgets; it's what they'd said, we've seen, I'll say, you're.
def step(state, key, value): return state - beta * (state @ key) + value  # 0123456789 3.14159
线性注意力把整个历史压缩成一个固定大小的矩阵，每个新的词都会更新它。门控决定遗忘多少。中文和English混排，
Быстрая коричневая лиса прыгает через ленивую собаку. Η γρήγορη αλεπού. الثعلب البني السريع.
शीघ्र भूरी लोमड़ी。 素早い茶色の狐はのろまな犬を飛び越える。빠른 갈색 여우가 게으른 개를 뛰어넘는다.
😀 😃 👩‍👩‍👧‍👦 🇫🇷 🏳️‍🌈 e\u0301cole nai\u0308ve e\u0323\u0302
\tif x == y:\n\t\treturn None\r\n    }}}}
"""


@functools.cache
def kimi_ranks(size: int = 1200) -> tuple[bytes, ...]:
    """Byte-pair tokens in order of rank, trained on the corpus with Kimi's split."""
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(byte_texts().values()),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.train_from_iterator(CORPUS.split("\n") * 3, trainer)
    values = {text: value for value, text in byte_texts().items()}
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    return tuple(bytes(values[c] for c in text) for text in sorted(vocab, key=vocab.__getitem__))


def slot_ids(ranks: int) -> dict[str, int]:
    """Name -> id of all 256 slots after so many ranks, reserved ones by the checkpoint's naming."""
    return {
        SLOTS[i][0] if i in SLOTS else f"<|reserved_token_{ranks + i}|>": ranks + i
        for i in range(256)
    }


def kimi_encoding(ranks: tuple[bytes, ...]) -> tiktoken.Encoding:
    """The oracle: tiktoken itself, with the split pattern and all slots as special tokens."""
    return tiktoken.Encoding(
        "kimi",
        pat_str=PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
        special_tokens=slot_ids(len(ranks)),
    )


def write_kimi_tokenizer(
    folder: Path,
    ranks: tuple[bytes, ...] | None = None,
    template: str | None = TEMPLATE,
    **settings: Any,
) -> Path:
    """Write tiktoken.model, tokenizer_config.json and a model config; returns the folder."""
    ranks = kimi_ranks() if ranks is None else ranks
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
    (folder / "tiktoken.model").write_text("".join(lines))
    ids = slot_ids(len(ranks))
    config = {
        "added_tokens_decoder": {
            str(ids[name]): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": special,
            }
            for name, special in SLOTS.values()
        },
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>", "<|im_assistant|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656,
        "tokenizer_class": "TikTokenTokenizer",
        **NAMED,
        **({"chat_template": template} if template else {}),
        **settings,
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(
        folder / "config.json",
        {
            "model_type": "kimi_linear",
            "vocab_size": len(ranks) + 256,
            "model_max_length": 1048576,
            "bos_token_id": ids["[BOS]"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["[PAD]"],
        },
    )
    write_json(folder / "generation_config.json", {"eos_token_id": ids["<|im_end|>"]})
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a key set to None is removed."""
    content = json.loads(path.read_text()) | changes
    write_json(path, {key: value for key, value in content.items() if value is not None})


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False))


def read_all(folder: Path) -> dict[str, mx.array]:
    """All tensors of a folder, read by MLX and not by the converter."""
    tensors: dict[str, mx.array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= mx.load(str(path))
    return tensors


def files_of(folder: Path) -> dict[str, bytes]:
    """Path -> bytes of every file below a folder, hidden ones too."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays have one dtype, one shape and the same bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    width = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[a.dtype.size]
    return mx.array_equal(mx.contiguous(a).view(width), mx.contiguous(b).view(width)).item()


def stock_logits(folder: Path, tokens: mx.array, dtype: mx.Dtype | None = None) -> mx.array:
    """Logits of stock mlx-lm for a folder, on request computed in another dtype."""
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    if dtype is not None:
        model.set_dtype(dtype)
    return model(tokens)


# Characters on every side of the split pattern: case, title case, marks, Han that are letters,
# numbers and symbols, contractions with a long s, digits of two scripts, spaces and line ends.
EDGES = "aAz'sStTvdDlLmſǅʰ中々〇⺀한é\u0301\u0902١12½ \n\r\t\u3000!_😀\u200d"


@functools.cache
def edge_ranks() -> tuple[bytes, ...]:
    """A vocabulary in which any two neighbours of EDGES join, so that ids tell each split apart."""
    single = [bytes([value]) for value in range(256)]
    chars = [char.encode() for char in EDGES]
    prefixes = {char[:n] for char in chars for n in range(2, len(char))}
    longer = [*sorted(prefixes), *(char for char in chars if len(char) > 1)]
    return tuple(dict.fromkeys([*single, *longer, *(a + b for a in chars for b in chars)]))
