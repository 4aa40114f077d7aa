"""Load a checkpoint and ask it questions, printing each answer as it is generated.

python examples/ask.py "What is an anchor?" "What is a candle?"
python examples/ask.py --model kimi-4bit "Why is the sky blue?"
"""

import argparse
from pathlib import Path

import mlx_kda
from mlx_kda.generate import stream_generate

TINY = Path(__file__).resolve().parent / "tiny-kimi-linear"


def main() -> None:
    """Print each question and its answer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("questions", nargs="*", default=["What is an anchor?"])
    parser.add_argument("--model", default=TINY, help="folder of a checkpoint, Hugging Face or MLX")
    args = parser.parse_args()
    model, tokenizer = mlx_kda.load(args.model)
    for question in args.questions:
        message = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True)
        print(f"> {question}")
        for piece in stream_generate(model, tokenizer, prompt, max_tokens=100):
            print(piece.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
