"""What a cache policy keeps of a long prompt: its memory, and a pass key from the middle.

    python examples/long_context.py --tokens 2000 --policy exact
    python examples/long_context.py --tokens 2000 --policy window:512+16

The KDA layers' states do not grow. The MLA layers' latents grow with the prompt under ``exact``,
and stop growing under a window, which forgets what falls out of it.
"""

import argparse
import itertools
import re
from pathlib import Path

import mlx_kda
from mlx_kda.context import Context
from mlx_kda.generate import decode_text

HERE = Path(__file__).resolve().parent
KEY = "71432"


def haystack(tokenizer, tokens: int) -> str:
    """Sentences of the Book of Ruth, repeated, with the key in the middle."""
    prose = (HERE / "train" / "held_out.txt").read_text(encoding="utf-8")
    sentences = [s.strip() + "." for s in re.split(r"[.:;]", prose) if s.strip()]
    found: list[str] = []
    length = 0
    for text in itertools.cycle(sentences):
        if length >= tokens - 80:
            break
        found.append(text)
        length += len(tokenizer.encode(" " + text))
    found.insert(len(found) // 2, f"The pass key is {KEY}. Remember it.")
    return " ".join(found)


def main() -> None:
    """Absorb the text in pieces, printing the cache's size; then ask for the key."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--policy", default="exact", help="exact, window:N+S, int8, int4")
    parser.add_argument("--model", default=HERE / "tiny-kimi-linear")
    args = parser.parse_args()
    model, tokenizer = mlx_kda.load(args.model)
    text = haystack(tokenizer, args.tokens)
    question = (
        "A pass key is hidden in this text. Find it and remember it.\n\n"
        f"{text}\n\nWhat is the pass key?"
    )
    message = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True)

    context = Context(model, policy=args.policy)

    def progress(done: int, total: int) -> None:
        print(f"{done:6,} of {total:,} tokens, cache {context.nbytes / 1024:,.0f} KiB")

    context.prefill(prompt, step=512, progress=progress)
    pieces = decode_text(context, tokenizer, max_tokens=20)
    answer = "".join(piece.text for piece in pieces)
    print(f"{answer.strip()}  ({'right' if KEY in answer else 'wrong'}: it was {KEY})")


if __name__ == "__main__":
    main()
