"""Talk with a model; the answers stream to standard output.

The conversation lives in one cache, so a turn reads only what is new. At a terminal Enter sends,
Alt-Enter or a backslash at the end of a line begins another line; on a pipe each line is a message.
Ctrl-C stops an answer and keeps the conversation; end of input ends. Lines that begin with / are
commands: /help.
"""

import argparse
from typing import TYPE_CHECKING

from ..cache.session_format import check_session
from . import loading, options, output
from .options import add_memory, add_model, add_option, add_sampling, sampling_options
from .session_file import Keeper, check_session_file
from .signals import ending

if TYPE_CHECKING:
    from ..session import Session

SUMMARY = "talk with a model"
EXAMPLE = (
    'mlx-kda chat kimi-4bit --system "Answer in one sentence." --temp 0.6\n'
    "  mlx-kda chat kimi-4bit --session monday.session\n"
    "  mlx-kda chat\n"
    "  printf 'Hello\\nAnd in French?\\n' | mlx-kda chat kimi-4bit"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(
        parser,
        nargs="?",
        help="folder or hub id of a checkpoint (default: examples/tiny-kimi-linear of this "
        "project's repository, converted to 4 bits the first time)",
    )
    add_option(parser, "--system", "TEXT", options.utf8_text, "system message")
    add_option(
        parser,
        "--resume",
        "FILE",
        options.file_name,
        "continue the session in this file, without changing the file",
    )
    add_option(
        parser,
        "--session",
        "FILE",
        options.file_name,
        "continue the session in this file, or start one; it is saved now and then, and at the end",
    )
    add_memory(parser)
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    if args.model is not None:
        loading.check_model(args.model)
    check_session_file(args.session)
    if args.resume is not None:
        check_session(args.resume)
    with Keeper(args.session) as keeper:
        return _talk(args, keeper)


def _talk(args: argparse.Namespace, keeper: Keeper) -> int:
    """The conversation, to its end; the exit status."""
    if args.model is None:
        args.model = _small_model()
    args.model = loading.local_folder(args.model)

    from .chat_commands import Talk
    from .terminal import Terminal

    session = _session(args, args.resume or (args.session if keeper.found else None))
    talk = Talk(session, sampling_options, keeper)
    talk.set_options(vars(args))
    terminal = Terminal(talk.said)
    if terminal.interactive:
        output.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends")
        if talk.session.messages:
            output.note(f"going on with {len(talk.session.messages)} messages")
    with ending():
        try:
            for line in terminal.lines():
                if not talk.take(line):
                    break
                terminal.after(talk)
                talk.keep()
                if talk.ended is not None:
                    break
        finally:
            talk.keep(at_end=True)
    return talk.ended or 0


def _small_model() -> str:
    """The folder of the model for a chat that names none."""
    from ..demo import CHECKPOINT, default_model

    folder = default_model(output.note)
    output.note(f"no MODEL was named: this is {CHECKPOINT.name}, which knows common nouns")
    return str(folder)


def _session(args: argparse.Namespace, source: str | None) -> "Session":
    """The session of a file, or a new one; what does not need the weights is checked before."""
    from ..tokenizer import load_tokenizer
    from ..transcript import chat_ids

    loading.check_memory(args, args.max_tokens, args.policy)
    tokenizer = load_tokenizer(args.model)
    chat_ids(tokenizer, [{"role": "user", "content": ""}])  # refuses a model without a template
    model = loading.load_model(args.model)
    return loading.open_session(args, model, tokenizer, source)
