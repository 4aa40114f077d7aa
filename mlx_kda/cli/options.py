"""Options that several commands share: sampling, reading the prompt, memory."""

import argparse
from typing import Any

from .parsing import number, policy

LARGEST = 10**9  # tokens of an answer, or of a top-k
LARGEST_SEED = 2**64 - 1
COLDEST = 1e-4
BITS = (2, 3, 4, 5, 6, 8)  # of quantised weights
POLICY = (
    "what the attention layers keep: exact, window:N or window:N+S (the last N tokens and the "
    "first S), int8, int4, or both as in window:4096+16,int8"
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The options that choose the next token."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=number(int, 0, LARGEST),
        default=512,
        metavar="N",
        help="tokens of an answer at most (default: 512)",
    )
    group.add_argument(
        "--temp",
        type=number(float, 0, 100),
        default=0.0,
        metavar="T",
        help="temperature (default: 0, the most likely token)",
    )
    group.add_argument(
        "--top-p",
        type=number(float, 0, 1),
        default=0.0,
        metavar="P",
        help="draw from the likeliest tokens that make up this probability (default: 0, all)",
    )
    group.add_argument(
        "--top-k",
        type=number(int, 0, LARGEST),
        default=0,
        metavar="K",
        help="draw from the K likeliest tokens (default: 0, all)",
    )
    group.add_argument(
        "--min-p",
        type=number(float, 0, 1),
        default=0.0,
        metavar="P",
        help="leave out tokens less likely than P times the likeliest (default: 0, none)",
    )
    group.add_argument(
        "--repetition-penalty",
        type=number(float, 0.1, 10),
        metavar="X",
        help="make the last 20 tokens less likely by this factor (default: 1, as likely)",
    )
    group.add_argument(
        "--seed",
        type=number(int, 0, LARGEST_SEED),
        metavar="N",
        help="make sampling repeatable (default: another draw each time)",
    )
    group.add_argument(
        "--speculate",
        action="store_true",
        help="guess tokens from repetitions in the text and verify them: the same text, sooner",
    )
    add_prefill_step(parser)


def add_prefill_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill-step",
        type=number(int, 1, LARGEST),
        metavar="N",
        help="tokens of the prompt read at a time; a stop waits for as many (default: 2048 on a "
        "GPU, 64 on a CPU)",
    )


def add_memory(parser: argparse.ArgumentParser) -> None:
    """The options of the cache and of what fits."""
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--policy",
        type=policy,
        metavar="P",
        help=f"{POLICY} (default: exact)",
    )
    group.add_argument(
        "--force", action="store_true", help="run although this machine's memory is too small"
    )


def sampling_options(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """The keyword arguments of ``decode_text`` for those options."""
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    # Below this MLX's float32 overflows, and the draw is the most likely token's long before.
    temp = args.temp if args.temp >= COLDEST else 0.0
    # top_k of the whole vocabulary or more leaves every token in, and mlx-lm refuses it.
    top_k = args.top_k if args.top_k < model.args.vocab_size else 0
    sampler = make_sampler(temp, top_p=args.top_p, min_p=args.min_p, top_k=top_k)
    processors = make_logits_processors(repetition_penalty=args.repetition_penalty)
    return {
        "max_tokens": args.max_tokens,
        "sampler": sampler,
        "logits_processors": processors,
        "seed": args.seed,
        "speculate": args.speculate,
    }
