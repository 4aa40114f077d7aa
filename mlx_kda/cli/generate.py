"""Answer one prompt, or go on from a text with --raw, streaming to standard output.

With --session the session is kept in a file: a later run goes on from there without reading
anything again, and Ctrl-C keeps what was read and said so far.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from . import loading, options, output, reports
from .options import (
    add_json,
    add_memory,
    add_model,
    add_option,
    add_sampling,
    sampling_options,
)
from .session_file import SessionFile, check_session_file
from .signals import Stopped, stop_on_signals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..generate import Piece, Statistics
    from ..session import Session

SUMMARY = "answer one prompt"
EXAMPLE = (
    'mlx-kda generate kimi-4bit --prompt "What is an anchor?" --max-tokens 200 --stats\n'
    "  mlx-kda generate kimi-4bit --prompt-file chapter.txt --raw --temp 0.7 --seed 1\n"
    "  mlx-kda generate kimi-4bit --prompt-file book.txt --policy window:8192+64 "
    "--session book.session"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt",
        "-p",
        type=options.utf8_text,
        metavar="TEXT",
        help="the prompt; - reads standard input",
    )
    add_option(
        source,
        "--prompt-file",
        "FILE",
        options.file_name,
        "file with the prompt, in UTF-8; - reads standard input",
    )
    add_option(parser, "--system", "TEXT", options.utf8_text, "system message")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without a chat template"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="generate --max-tokens, past end tokens"
    )
    add_option(
        parser,
        "--session",
        "FILE",
        options.file_name,
        "continue the session in this file, or start one, and save it; without a prompt a session "
        "continues from its last token",
    )
    parser.add_argument(
        "--stats", action="store_true", help="print tokens/s and memory on standard error"
    )
    add_json(parser, "print one JSON object with text, tokens and statistics")
    add_memory(parser)
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    if args.raw and args.system is not None:
        raise UserError("--system needs the chat template, which --raw leaves out: drop one")
    loading.check_model(args.model)
    exists = check_session_file(args.session)
    prompt = _read_prompt(args)
    if prompt is None and not exists:
        raise UserError("no prompt: give --prompt TEXT, --prompt-file FILE or text on a pipe")
    if prompt is not None and not (prompt if args.raw else prompt.strip()):
        raise UserError("the prompt is empty: give some text")
    with SessionFile(args.session) as file:
        return _generate(args, prompt, file)


def _generate(args: argparse.Namespace, prompt: str | None, file: SessionFile) -> int:
    """Answer or go on, and keep the session; the exit status."""
    args.model = loading.local_folder(args.model)

    from ..generate import Statistics

    session = _open(args, prompt, file.exists)
    statistics = Statistics()
    text, tokens = [], []
    with stop_on_signals() as stop:
        with output.progress("reading") as bar:
            ids, pieces = _start(session, prompt, args, statistics, stop.watch(bar))
            try:
                for piece in pieces:
                    text.append(piece.text)
                    tokens.append(piece.token)
                    if not args.json:
                        output.write(piece.text)
                    if stop:
                        break
            except Stopped:
                pass
            except UserError:
                raise  # the file of before is worth more than what an error left
            except BaseException:
                file.save(session)
                raise
            finally:
                pieces.close()
        if not args.json:
            output.write("\n")
        file.save(session)
    if stop:
        statistics.finish_reason = "interrupted"
    _report(args, session, "".join(text), tokens, ids, statistics)
    if stop:
        kept = f"; {args.session} goes on from here" if args.session is not None else ""
        output.note(f"mlx-kda: interrupted{kept}")
        return stop.status
    return 0


def _open(args: argparse.Namespace, prompt: str | None, exists: bool) -> "Session":
    """The session of the file, if it ``exists``, or a new one, once it is known to fit."""
    from ..tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.model)
    ids = tokenizer.encode(prompt or "")
    limit = loading.check_model(args.model).model_max_length
    if len(ids) > limit:  # known before the weights are read
        raise UserError(
            f"the prompt of {len(ids):,} tokens is longer than the model's context of {limit:,}: "
            "shorten it"
        )
    loading.check_memory(args, len(ids) + args.max_tokens, args.policy)
    model = loading.load_model(args.model)
    more = {} if args.session is not None else {"checkpoint_bytes": 0}
    file = args.session if exists else None
    session = loading.open_session(args, model, tokenizer, file, **more)
    if exists:
        tokens = len(session.context.tokens) + len(ids) + args.max_tokens
        loading.check_memory(args, tokens, session.policy)
    return session


def _start(
    session: "Session",
    prompt: str | None,
    args: argparse.Namespace,
    statistics: "Statistics",
    progress: Any,
) -> "tuple[list[int], Iterator[Piece]]":
    """The prompt's ids, and the pieces to come."""
    from ..generate import encode_prompt, stream_generate

    sampling = {
        **sampling_options(args, session.context.model),
        "stop_ids": () if args.ignore_eos else None,
        "statistics": statistics,
    }
    if prompt is None:
        return [], session.generate(**sampling)
    if args.raw:
        ids = encode_prompt(session.tokenizer, prompt)
        return ids, stream_generate(
            session.context.model,
            session.tokenizer,
            _unread(ids, session.context.tokens),
            context=session.context,
            prefill_step=args.prefill_step,
            every=session.checkpoint_every,
            progress=progress,
            **sampling,
        )
    messages = [*session.messages, {"role": "user", "content": prompt}]
    if len(messages) > 2 and messages[-2]["content"] == "" and messages[-3] == messages[-1]:
        messages = messages[:-2]  # a run before was interrupted while it read this very prompt
    pieces = session.send(messages, progress=progress, **sampling)
    return session.transcript.ids, pieces


def _unread(ids: list[int], read: list[int]) -> list[int]:
    """What of a text is to be read: the rest, where a run before came through part of it or all."""
    shared = min(len(ids), len(read))
    return ids[shared:] if ids[:shared] == read[:shared] else ids


def _report(
    args: argparse.Namespace,
    session: "Session",
    text: str,
    tokens: list[int],
    ids: list[int],
    statistics: "Statistics",
) -> None:
    if args.json:
        result = {
            "text": text,
            "tokens": tokens,
            "prompt_tokens": ids,
            "statistics": statistics.as_dict(),
            "cache": [
                {**vars(layer), "bytes_at_end": layer.bytes_at(len(session.context.tokens))}
                for layer in session.layers()
            ],
        }
        print(json.dumps(result, ensure_ascii=False))
    if args.stats:
        for line in reports.describe(statistics):
            output.note(line)
        for line in reports.describe_layers(session.layers(), len(session.context.tokens)):
            output.note(line)


def _read_prompt(args: argparse.Namespace) -> str | None:
    """The prompt as text; None where none was given and a terminal is no source of one."""
    if args.prompt is not None and args.prompt != "-":
        return args.prompt
    from_input = "-" in (args.prompt, args.prompt_file)
    if args.prompt_file is None and not from_input and sys.stdin.isatty():
        return None
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
    if not text and not from_input and args.prompt_file is None:
        return None  # neither a pipe nor a terminal
    # A file's last line break is part of a text to go on from, and no part of a message.
    return text if args.raw else text.removesuffix("\n")
