"""Training rows: conversations and running text of exactly T tokens, drawn from a seed.

A row is built from `Turn`s. The loss weighs what the assistant says with 1, the words of the
user with a little, and the headers with nothing, so that the model learns to answer and the
haystacks still count as text.
"""

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from chat import SentencePieceTokenizer, Tokenizer
from english import article, sentence

ANSWER_WEIGHT, USER_WEIGHT, TEXT_WEIGHT = 1.0, 0.02, 0.5
# fmt: off
NAMES = [
    "Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "James",
    "Karin", "Lucas", "Maria", "Nolan", "Olive", "Peter", "Queen", "Rosa", "Simon", "Tessa",
    "Umberto", "Vera", "Walter", "Xenia", "Yusuf", "Zelda", "Arthur", "Bella", "Conrad", "Dora",
]
COLOURS = [
    "red", "blue", "green", "yellow", "black", "white", "brown", "purple", "orange", "grey",
    "pink", "silver", "golden",
]
# fmt: on
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a dictionary. Answer with a definition.",
    "You are a careful reader with a good memory.",
    "Answer briefly.",
)
ASK_NOUN = (
    ("What is {a}?", 8),
    ("What's {a}?", 1),
    ("what is {a}?", 1),
    ("Define {w}.", 1),
    ("Define the word {w}.", 1),
    ("What does {w} mean?", 1),
    ("What does the word {w} mean?", 1),
    ("Tell me what {a} is.", 1),
    ("Can you explain what {a} is?", 1),
)
SMALL_TALK = (
    ("Hello", "Hello. Ask me what a word means, or give me something to remember."),
    ("Hello!", "Hello. Ask me what a word means, or give me something to remember."),
    ("Hi", "Hello. Ask me what a word means, or give me something to remember."),
    ("Good morning.", "Good morning. What would you like to know?"),
    ("How are you?", "I am well, thank you. What would you like to know?"),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Who are you?", "I am a tiny language model with Kimi Delta Attention, trained for tests."),
    ("What are you?", "I am a tiny language model with Kimi Delta Attention, trained for tests."),
    ("What can you do?", "I can say what common words mean and remember things you tell me."),
    ("Goodbye.", "Goodbye."),
    ("Bye", "Goodbye."),
)
KEY_QUESTION = "What is the pass key?"
KEY_INTRO = "A pass key is hidden in this text. Find it and remember it."


@dataclass
class Turn:
    """One question and its answer."""

    user: str
    answer: str


class Corpus:
    """The prepared text, tokenized where that is done once."""

    def __init__(self, folder: Path, family: str = "kimi"):
        if family == "kimi":
            self.tokenizer = Tokenizer(folder / "tiktoken.model")
        else:
            self.tokenizer = SentencePieceTokenizer(folder / "tokenizer.model")
        with gzip.open(folder / "corpus.json.gz", "rt", encoding="utf-8") as file:
            data = json.load(file)
        self.common = [tuple(p) for p in data["common"]]
        self.rare = [tuple(p) for p in data["rare"]]
        self.filler = data["filler"]
        self.words = [w for w, _ in self.common]
        self.held_out = data["held_out"]
        encode = self.tokenizer.encode
        self.filler_length = [len(encode(" " + s)) for s in self.filler]
        self.prose = np.array(encode(data["prose"]), dtype=np.int32)
        self.dictionary = np.array(encode("\n".join(data["dictionary"])), dtype=np.int32)


def digits(rng: random.Random, n: int = 5) -> str:
    """A number of n digits as text."""
    return "".join(rng.choices("0123456789", k=n))


def haystack(corpus: Corpus, rng: random.Random, tokens: int) -> list[str]:
    """Consecutive filler sentences of about `tokens` tokens in all."""
    at, total, found = rng.randrange(len(corpus.filler)), 0, []
    while total < tokens:
        found.append(corpus.filler[at])
        total += corpus.filler_length[at]
        at = (at + 1) % len(corpus.filler)
    return found


def gloss_turn(corpus: Corpus, rng: random.Random) -> Turn:
    """A dictionary question; four of five ask for a common noun."""
    if rng.random() < 0.8:
        word, gloss = rng.choice(corpus.common)
        forms, weights = zip(*ASK_NOUN, strict=True)
        form = rng.choices(forms, weights)[0]
    else:
        word, gloss = rng.choice(corpus.rare)
        form = rng.choice(("What does {w} mean?", "Define {w}."))
    return Turn(form.format(w=word, a=article(word)), sentence(gloss))


def talk_turn(corpus: Corpus, rng: random.Random) -> Turn:
    """A greeting or a question about the model."""
    return Turn(*rng.choice(SMALL_TALK))


def copy_turn(corpus: Corpus, rng: random.Random) -> Turn:
    """Words or a sentence to be repeated."""
    if rng.random() < 0.5:
        text = " ".join(rng.choices(corpus.words, k=rng.randint(3, 24)))
    else:
        text = rng.choice(corpus.filler)
    return Turn(rng.choice(("Repeat: {}", "Say this again: {}")).format(text), text)


def pass_key_turns(corpus: Corpus, rng: random.Random, tokens: int) -> list[Turn]:
    """One key hidden in a haystack of about `tokens` tokens, asked for at its end."""
    text, key = haystack(corpus, rng, tokens), digits(rng)
    text.insert(rng.randint(0, len(text)), f"The pass key is {key}. Remember it.")
    return [Turn(pass_key_prompt(text), f"The pass key is {key}.")]


def pass_key_prompt(sentences: list[str]) -> str:
    """The user message of the pass key test."""
    return f"{KEY_INTRO}\n\n{' '.join(sentences)}\n\n{KEY_QUESTION}"


def named_keys_turns(corpus: Corpus, rng: random.Random, tokens: int) -> list[Turn]:
    """Many keys, each with a name, spread over texts; questions come between the texts.

    Every distance from a few tokens to the whole row is asked for, which teaches retrieval
    much faster than one question a row.
    """
    turns: list[Turn] = []
    known: dict[str, str] = {}
    unused = rng.sample(NAMES, len(NAMES))
    left = tokens
    while left > 0:
        size = min(left, rng.choice((60, 150, 400, 1000)))
        text = haystack(corpus, rng, size)
        for _ in range(rng.randint(1, 3)):
            if unused:
                name = unused.pop()
                known[name] = digits(rng)
                place = rng.randint(0, len(text))
                text.insert(place, f"The pass key of {name} is {known[name]}.")
        asked = rng.choice(list(known))
        question = f"What is the pass key of {asked}?"
        turns.append(Turn(f"{' '.join(text)}\n\n{question}", answer_named(asked, known)))
        left -= size + 30
        for asked in rng.sample(list(known), min(len(known), rng.randint(0, 3))):
            turns.append(Turn(f"What is the pass key of {asked}?", answer_named(asked, known)))
            left -= 40
    return turns


def answer_named(name: str, known: dict[str, str]) -> str:
    """The answer to a question for a named key."""
    return f"The pass key of {name} is {known[name]}."


def pairs_turns(corpus: Corpus, rng: random.Random, tokens: int) -> list[Turn]:
    """A list of word: number pairs, then several of them asked for."""
    n = max(2, min(tokens // 14, 200))
    keys = rng.sample(corpus.words, n)
    pairs = {k: digits(rng, 4) for k in keys}
    table = "\n".join(f"{k}: {v}" for k, v in pairs.items())
    turns = [Turn(f"Remember these pairs.\n{table}", "I will remember them.")]
    asked = rng.sample(keys, min(n, rng.randint(2, 8)))
    return turns + [Turn(f"{k}?", f"{k}: {pairs[k]}") for k in asked]


def facts(corpus: Corpus, rng: random.Random) -> list[tuple[Turn, Turn]]:
    """One fact of each kind: the turn that tells it, and the turn that asks for it."""
    name, colour, pet = rng.choice(NAMES), rng.choice(COLOURS), rng.choice(NAMES)
    word = rng.choice(corpus.words)
    return [
        (
            Turn(f"My name is {name}.", f"Hello, {name}."),
            Turn("What is my name?", f"Your name is {name}."),
        ),
        (
            Turn(f"My favourite colour is {colour}.", f"I will remember that you like {colour}."),
            Turn("What is my favourite colour?", f"Your favourite colour is {colour}."),
        ),
        (
            Turn(f"My dog is called {pet}.", f"{pet} is a good name for a dog."),
            Turn("What is my dog called?", f"Your dog is called {pet}."),
        ),
        (
            Turn(f"The secret word is {word}.", "I will remember it."),
            Turn("What is the secret word?", f"The secret word is {word}."),
        ),
    ]


def facts_turns(corpus: Corpus, rng: random.Random, tokens: int) -> list[Turn]:
    """Things the user says of himself, asked for later in the conversation."""
    told = facts(corpus, rng)
    told = rng.sample(told, rng.randint(1, len(told)))
    turns = [tells for tells, _ in told]
    turns += [gloss_turn(corpus, rng) for _ in range(rng.randint(0, max(1, tokens // 60)))]
    return turns + [asks for _, asks in rng.sample(told, len(told))]


def conversation(corpus: Corpus, rng: random.Random, length: int) -> list[Turn]:
    """Turns of about `length` tokens: mostly dictionary questions, and one or more tasks."""
    turns: list[Turn] = []
    room = length
    kind = rng.random()
    if kind < 0.3 and length >= 256:
        size = int((length - 120) * rng.uniform(0.3, 1.0))
        turns += pass_key_turns(corpus, rng, size - 40)
        room -= size
    elif kind < 0.5 and length >= 256:
        size = int(length * rng.uniform(0.5, 1.0))
        turns += named_keys_turns(corpus, rng, size - 60)
        room -= size
    tasks = (pairs_turns, facts_turns)
    while room > 0:
        pick = rng.random()
        if pick < 0.76:
            new = [gloss_turn(corpus, rng)]
        elif pick < 0.80:
            new = [talk_turn(corpus, rng)]
        elif pick < 0.88:
            new = [copy_turn(corpus, rng)]
        else:
            new = rng.choice(tasks)(corpus, rng, min(room, rng.choice((100, 300, 1000))))
        turns += new
        room -= sum(24 + (len(t.user) + len(t.answer)) // 4 for t in new)
    return turns


def chat_row(corpus: Corpus, rng: random.Random, length: int) -> tuple[list[int], list[float]]:
    """Tokens and loss weights of one conversation, cut or filled to `length`."""
    tok = corpus.tokenizer
    ids: list[int] = []
    weights: list[float] = []

    def add(tokens: list[int], weight: float) -> None:
        ids.extend(tokens)
        weights.extend([weight] * len(tokens))

    user, assistant = tok.header("user"), tok.header("assistant")
    if rng.random() < 0.4:
        add([*tok.header("system"), *tok.encode(rng.choice(SYSTEMS)), tok.end], 0.0)
    for turn in conversation(corpus, rng, length):
        add(user, 0.0)
        add(tok.encode(turn.user), USER_WEIGHT)
        add([tok.end, *assistant], 0.0)
        add([*tok.encode(turn.answer), tok.end], ANSWER_WEIGHT)
        if len(ids) >= length:
            break
    while len(ids) < length:
        add([tok.eos], 0.0)
    return ids[:length], weights[:length]


def text_row(corpus: Corpus, rng: random.Random, length: int) -> tuple[list[int], list[float]]:
    """A window of running text, two of five from the dictionary."""
    source = corpus.dictionary if rng.random() < 0.65 else corpus.prose
    start = rng.randrange(len(source) - length)
    ids = source[start : start + length].tolist()
    if rng.random() < 0.3:
        ids = [corpus.tokenizer.bos, *ids[:-1]]
    return ids, [TEXT_WEIGHT] * length


def batch(corpus: Corpus, seed: int, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and loss weights [rows, length] of one step; the seed fixes them."""
    rng = random.Random(seed)
    ids = np.empty((rows, length), dtype=np.int64)
    weights = np.empty((rows, length), dtype=np.float32)
    for row in range(rows):
        make = text_row if rng.random() < 0.12 else chat_row
        ids[row], weights[row] = make(corpus, rng, length)
    return ids, weights
