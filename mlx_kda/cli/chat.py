"""Chat with a model; its answers stream to standard output.

Each turn processes only its new tokens. At a terminal Enter sends the message; Alt-Enter, or a
backslash at the end of a line, starts a new line. On a pipe each line is a message. Ctrl-C stops an
answer and keeps the conversation; end of input (Ctrl-D) ends the chat. Lines that begin with / are
commands; /help lists them.
"""

import argparse
from typing import TYPE_CHECKING

from ..cache.session_format import check_session
from . import loading, options, output
from .options import add_memory, add_model, add_option, add_sampling
from .session_file import SessionFile, check_session_file
from .signals import exit_on_signals

if TYPE_CHECKING:
    from ..session import Session

SUMMARY = "chat with a model"
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
        "continue the session in this file, or start one; saved during the chat and at its end",
    )
    add_memory(parser)
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    if args.model is not None:
        loading.check_model(args.model)
    check_session_file(args.session)
    if args.resume is not None:
        check_session(args.resume)
    with SessionFile(args.session) as file:
        return _chat(args, file)


def _chat(args: argparse.Namespace, file: SessionFile) -> int:
    """Chat until the end of input; the exit status."""
    if args.model is None:
        args.model = _default_model()
    args.model = loading.local_folder(args.model)

    from .chat_commands import Chat
    from .terminal import Terminal

    session = _open_session(args, args.resume or (args.session if file.exists else None))
    chat = Chat(session, file)
    chat.set_options(vars(args))
    terminal = Terminal(chat.user_messages)
    if terminal.interactive:
        output.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends the chat")
        if session.messages:
            output.note(f"continuing a conversation of {len(session.messages)} messages")
    with exit_on_signals():
        try:
            for line in terminal.lines():
                if not chat.handle(line):
                    break
                terminal.show_status(chat)
                chat.save_if_due()
                if chat.exit_status is not None:
                    break
        finally:
            chat.save()
    return chat.exit_status or 0


def _default_model() -> str:
    """The folder of the small model, for a chat without MODEL."""
    from ..demo import CHECKPOINT, default_model

    folder = default_model(output.note)
    output.note(f"no MODEL given: using {CHECKPOINT.name}, which only knows common nouns")
    return str(folder)


def _open_session(args: argparse.Namespace, path: str | None) -> "Session":
    """The session of a file, or a new one; memory and template are checked before the weights."""
    from ..tokenizer import load_tokenizer
    from ..transcript import chat_ids

    loading.check_memory(args, args.max_tokens, args.policy)
    tokenizer = load_tokenizer(args.model)
    chat_ids(tokenizer, [{"role": "user", "content": ""}])  # raises if there is no chat template
    return loading.open_session(args, loading.load_model(args.model), tokenizer, path)
