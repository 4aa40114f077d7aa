"""What the tests of the trained checkpoints in examples/ share."""

import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from tolerances import GOLDEN, LAYER_HALF

import mlx_kda
from mlx_kda.generate import stream_generate

TESTS = Path(__file__).resolve().parent.parent
EXAMPLES = TESTS.parent / "examples"
TRAIN = EXAMPLES / "train"
GLOSSES = dict(line.split("\t") for line in (TRAIN / "words.tsv").read_text().splitlines())


def train_script(name: str) -> ModuleType:
    """A script of examples/train as a module; nothing of it runs."""
    sys.path.insert(0, str(TRAIN))
    try:
        spec = importlib.util.spec_from_file_location(f"train_{name}", TRAIN / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(TRAIN))
    return module


def prompt(tokenizer: Any, *messages: tuple[str, str]) -> list[int]:
    """The ids of (role, text) messages and the opening of an answer."""
    turns = [{"role": role, "content": text} for role, text in messages]
    return tokenizer.apply_chat_template(turns, tokenize=True, add_generation_prompt=True)


def answer(loaded: tuple[Any, Any], *messages: tuple[str, str], limit: int = 48) -> str:
    """The greedy answer of a (model, tokenizer) to (role, text) messages."""
    model, tokenizer = loaded
    ids = prompt(tokenizer, *messages)
    return "".join(piece.text for piece in stream_generate(model, tokenizer, ids, max_tokens=limit))


def wrong_glosses(loaded: tuple[Any, Any], words: Iterable[str], end: int) -> list[str]:
    """Those of the words whose gloss is not given word for word and ended by the token `end`.

    Greedy decoding gives a gloss if and only if it is the arg max at each of its positions, so one
    pass over question and gloss judges a word.
    """
    model, tokenizer = loaded
    wrong = []
    for word in words:
        article = "an" if word[0] in "aeiou" else "a"
        ids = prompt(tokenizer, ("user", f"What is {article} {word}?"))
        gloss = GLOSSES[word][0].upper() + GLOSSES[word][1:].rstrip(".") + "."
        want = tokenizer.encode(gloss, add_special_tokens=False)
        logits = model(mx.array([[*ids, *want]]))[0, len(ids) - 1 :]
        if logits.argmax(-1).tolist() != [*want, end]:
            wrong.append(word)
    return wrong


def check_golden_logits(folder: Path, golden: Path, dtype: str) -> None:
    """The logits of a checkpoint on the two texts of a golden file, within the table's bounds."""
    wanted = np.load(golden)
    model = mlx_kda.load(folder)[0]
    if dtype == "float32":
        model.update(tree_map(lambda p: p.astype(mx.float32), model.parameters()))
    bound = {"float32": GOLDEN, "bfloat16": 2 * LAYER_HALF["bfloat16"]}[dtype]
    for number in (0, 1):
        tokens, want = wanted[f"tokens_{number}"], wanted[f"logits_{number}"]
        got = np.array(model(mx.array(tokens)[None])[0, -len(want) :].astype(mx.float32))
        assert np.abs(got - want).max() / np.abs(want).max() < bound
        if dtype == "float32":
            assert (got.argmax(-1) == want.argmax(-1)).all()


def check_card(name: str) -> tuple[dict, dict]:
    """The measured part of a card is what measure.py makes of its records, which are returned."""
    measure = train_script("measure")
    family = measure.FAMILIES[name]
    results = json.loads(family.record("results").read_text())
    device = json.loads(family.record("device").read_text())
    card = (EXAMPLES / family.folder / "README.md").read_text()
    part = card.split(measure.BEGIN)[1].split(measure.END)[0]
    assert part.strip() == measure.tables(results, device, family)
    return measure.tally(results), device
