"""What the checkpoint must be able to do, as cases that any runner can judge.

A case is a prompt and the one right answer. Greedy decoding gives exactly that answer if and
only if the arg max at every position of the answer is the next token of the answer, so one
forward pass over prompt + answer judges a case.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from english import article, sentence
from tasks import (
    Corpus,
    Turn,
    digits,
    facts,
    facts_turns,
    gloss_turn,
    haystack,
    pairs_turns,
    pass_key_prompt,
)

SEED = 2026


@dataclass
class Case:
    """Token ids of prompt + answer; the answer begins at `start` and ends with <|im_end|>."""

    ids: list[int]
    start: int


def case(corpus: Corpus, messages: list[tuple[str, str]], answer: str) -> Case:
    """A case from (role, text) messages and the right answer."""
    prompt = corpus.tokenizer.prompt(messages)
    return Case([*prompt, *corpus.tokenizer.encode(answer), corpus.tokenizer.end], len(prompt))


def gloss_cases(corpus: Corpus, count: int | None = None) -> list[Case]:
    """Dictionary questions for `count` of the common nouns (all of them if None)."""
    pairs = corpus.common
    if count is not None:
        pairs = random.Random(SEED).sample(pairs, count)
    return [
        case(corpus, [("user", f"What is {article(word)}?")], sentence(gloss))
        for word, gloss in pairs
    ]


def pass_key_case(corpus: Corpus, tokens: int, depth: float, seed: int) -> Case:
    """One key at `depth` (0 first, 1 last) of a prompt of about `tokens` tokens."""
    rng = random.Random(f"{SEED}-{tokens}-{seed}")
    text, key = haystack(corpus, rng, tokens - 80), digits(rng)
    text.insert(round(depth * len(text)), f"The pass key is {key}. Remember it.")
    return case(corpus, [("user", pass_key_prompt(text))], f"The pass key is {key}.")


def pass_key_cases(corpus: Corpus, tokens: int, count: int) -> list[Case]:
    """`count` cases of one length with the key at evenly spaced depths."""
    depths = [(i + 0.5) / count for i in range(count)]
    return [pass_key_case(corpus, tokens, depth, i) for i, depth in enumerate(depths)]


def turn_cases(corpus: Corpus, kind: str, count: int, tokens: int) -> list[Case]:
    """The last question of a conversation of pairs or of facts."""
    rng = random.Random(f"{SEED}-{kind}")
    make = {"pairs": pairs_turns, "facts": facts_turns}[kind]
    cases = []
    for _ in range(count):
        turns = make(corpus, rng, tokens)
        messages = [m for t in turns[:-1] for m in (("user", t.user), ("assistant", t.answer))]
        cases.append(case(corpus, [*messages, ("user", turns[-1].user)], turns[-1].answer))
    return cases


def between(corpus: Corpus, rng: random.Random, kind: str, tokens: int) -> list[Turn]:
    """About `tokens` tokens of other talk: questions for words, or one message of sentences."""
    if kind == "sentences":
        return [Turn(" ".join(haystack(corpus, rng, tokens)), "Thank you.")]
    turns: list[Turn] = []
    length = 0
    while length < tokens:
        turns.append(gloss_turn(corpus, rng))
        messages = [("user", turns[-1].user), ("assistant", turns[-1].answer)]
        length += len(corpus.tokenizer.prompt(messages))
    return turns


def fact_cases(corpus: Corpus, kind: str, tokens: int, count: int) -> list[Case]:
    """A fact told first in a conversation, asked for after about `tokens` tokens of other talk.

    The four facts take turns: a name, a colour, a dog's name, a word.
    """
    cases = []
    for number in range(count):
        rng = random.Random(f"{SEED}-fact-{kind}-{tokens}-{number}")
        told = facts(corpus, rng)
        tells, asks = told[number % len(told)]
        turns = [tells, *between(corpus, rng, kind, tokens)]
        messages = [m for t in turns for m in (("user", t.user), ("assistant", t.answer))]
        cases.append(case(corpus, [*messages, ("user", asks.user)], asks.answer))
    return cases


Judge = Callable[[list[Case]], list[np.ndarray]]


def accuracy(judge: Judge, cases: list[Case]) -> float:
    """The share of cases answered exactly.

    judge(cases) returns for each case the arg max tokens that the model gives for positions
    start ... len(ids) - 1, each after seeing the ids before it.
    """
    answers = judge(cases)
    right = sum(np.array_equal(a, c.ids[c.start :]) for a, c in zip(answers, cases, strict=True))
    return right / len(cases)


def per_byte(total_nats: float, text: str) -> float:
    """Bits per byte of a text from the sum of its tokens' negative log-likelihoods."""
    return total_nats / math.log(2) / len(text.encode())
