"""Answer one prompt, or continue it with --raw; the output streams to standard output.

With --session the session is saved to a file. A later run continues it without processing anything
again, and Ctrl-C saves what was processed and generated so far.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from . import loading, options, output, reports
from .options import add_json, add_memory, add_model, add_option, add_sampling, sampling_options
from .session_file import SessionFile, check_session_file
from .signals import Stopped, stop_on_signals

if TYPE_CHECKING:
    from ..generate import Statistics
    from ..session import Pieces, Session

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
        "--ignore-eos", action="store_true", help="ignore end tokens: generate all of --max-tokens"
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
        raise UserError(
            "--system needs the chat template, which --raw leaves out: drop one of them"
        )
    loading.check_model(args.model)
    exists = check_session_file(args.session)
    prompt = _read_prompt(args)
    if prompt is None and not exists:
        raise UserError("no prompt: give --prompt TEXT, --prompt-file FILE or text on a pipe")
    if prompt is not None and not (prompt if args.raw else prompt.strip()):
        raise UserError("the prompt is empty")
    with SessionFile(args.session) as file:
        return _generate(args, prompt, file)


def _generate(args: argparse.Namespace, prompt: str | None, file: SessionFile) -> int:
    """Answer the prompt or continue the session, and save it; the exit status."""
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
                raise  # the file as it was is worth more than what an error left
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
        saved = f"; the session is saved in {args.session}" if args.session is not None else ""
        output.note(f"mlx-kda: interrupted{saved}")
        return stop.status
    return 0


def _open(args: argparse.Namespace, prompt: str | None, exists: bool) -> "Session":
    """The session of the file if it ``exists``, or a new one; UserError if it cannot fit."""
    from ..tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.model)
    ids = tokenizer.encode(prompt or "")
    limit = loading.check_model(args.model).model_max_length
    if len(ids) > limit:  # checked before the weights are loaded
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
) -> "tuple[list[int], Pieces]":
    """The prompt's ids, and the pieces of the answer."""
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
            _new_ids(ids, session.context.tokens),
            context=session.context,
            prefill_step=args.prefill_step,
            every=session.checkpoint_every,
            progress=progress,
            **sampling,
        )
    messages = [*session.messages, {"role": "user", "content": prompt}]
    if len(messages) > 2 and messages[-2]["content"] == "" and messages[-3] == messages[-1]:
        messages = messages[
            :-2
        ]  # an earlier run was interrupted while it processed this very prompt
    pieces = session.send(messages, progress=progress, **sampling)
    return session.transcript.ids, pieces


def _new_ids(ids: list[int], absorbed: list[int]) -> list[int]:
    """The ids of a raw prompt to process: not those that an earlier run processed already."""
    shared = min(len(ids), len(absorbed))
    return ids[shared:] if ids[:shared] == absorbed[:shared] else ids


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
    """The prompt; None if none was given, and standard input is a terminal or empty."""
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
        raise UserError(f"{where} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"cannot read {args.prompt_file}: {error.strerror}") from None
    if not text and not from_input and args.prompt_file is None:
        return None  # neither a pipe nor a terminal
    # A final line break belongs to a raw prompt, not to a message.
    return text if args.raw else text.removesuffix("\n")
