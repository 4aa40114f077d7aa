"""Answer one prompt, or go on from a text with --raw, streaming to standard output."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_kda.cli import common
from mlx_kda.errors import UserError

SUMMARY = "answer one prompt"
EXAMPLE = (
    'mlx-kda generate kimi-4bit --prompt "What is an anchor?" --max-tokens 200 --stats\n'
    "  mlx-kda generate kimi-4bit --prompt-file chapter.txt --raw --temp 0.7 --seed 1"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a checkpoint")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", "-p", metavar="TEXT", help="the prompt; - reads standard input")
    source.add_argument("--prompt-file", metavar="FILE", help="a file in UTF-8; - as above")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument(
        "--raw", action="store_true", help="no chat template: go on from the text as it stands"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="run to --max-tokens past the end tokens"
    )
    parser.add_argument("--stats", action="store_true", help="rates and memory on standard error")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object with text, tokens and statistics"
    )
    common.add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    if args.raw and args.system is not None:
        raise UserError("--system needs the chat template, which --raw leaves out: drop one")
    prompt = _read_prompt(args)
    if not prompt:
        raise UserError("the prompt is empty: give some text")

    from mlx_kda.generate import Statistics, encode_prompt, stream_generate

    model, tokenizer = common.load_model(args.model)
    ids = encode_prompt(tokenizer, prompt) if args.raw else _chat_ids(tokenizer, prompt, args)
    statistics = Statistics()
    text, tokens = [], []
    with _line_ended(args.json), common.progress("reading") as update:
        pieces = stream_generate(
            model,
            tokenizer,
            ids,
            prefill_step=args.prefill_step,
            stop_ids=() if args.ignore_eos else None,
            progress=update,
            statistics=statistics,
            **common.sampling_options(args, model),
        )
        for piece in pieces:
            text.append(piece.text)
            tokens.append(piece.token)
            if not args.json:
                common.write(piece.text)
    if args.json:
        result = {
            "text": "".join(text),
            "tokens": tokens,
            "prompt_tokens": ids,
            "statistics": statistics.as_dict(),
        }
        print(json.dumps(result, ensure_ascii=False))
    if args.stats:
        for line in common.describe(statistics):
            common.note(line)
    return 0


@contextlib.contextmanager
def _line_ended(silent: bool) -> Iterator[None]:
    """End the line of a streamed text, on Ctrl-C too."""
    try:
        yield
    except KeyboardInterrupt:
        if not silent:
            common.write("\n")
        raise
    if not silent:
        common.write("\n")


def _chat_ids(tokenizer: Any, prompt: str, args: argparse.Namespace) -> list[int]:
    from mlx_kda.messages import chat_ids

    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    return chat_ids(tokenizer, [*messages, {"role": "user", "content": prompt}])


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.prompt != "-":
        return args.prompt
    from_input = "-" in (args.prompt, args.prompt_file)
    if args.prompt_file is None and not from_input and sys.stdin.isatty():
        raise UserError("no prompt: give --prompt TEXT, --prompt-file FILE or text on a pipe")
    try:
        if args.prompt_file is None or from_input:
            text = sys.stdin.read()
        else:
            text = Path(args.prompt_file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        where = "standard input" if from_input else args.prompt_file
        raise UserError(f"{where} is not text in UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot read {args.prompt_file}: {error.strerror}") from None
    # A file's last line break is part of a text to go on from, and no part of a message.
    return text if args.raw else text.removesuffix("\n")
