"""Talk with a model. One message a line; the answers stream to standard output.

The conversation lives in one cache, so a turn reads only what is new. Ctrl-C stops an answer
and keeps the conversation; end of input ends. Lines that begin with / are commands: /help.
"""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mlx_kda.cli import common
from mlx_kda.errors import UserError

if TYPE_CHECKING:
    from mlx_kda.generate import Statistics
    from mlx_kda.session import Session

SUMMARY = "talk with a model"
EXAMPLE = (
    'mlx-kda chat kimi-4bit --system "Answer in one sentence." --temp 0.6\n'
    "  printf 'Hello\\nAnd in French?\\n' | mlx-kda chat kimi-4bit"
)

HELP = """\
/reset   forget the conversation (the system message stays)
/stats   tokens, rates and memory of the last answer, and the context used
/help    this list
/exit    end; so does the end of input (Ctrl-D)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a checkpoint")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    common.add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    from mlx_kda.messages import chat_ids
    from mlx_kda.session import Session

    model, tokenizer = common.load_model(args.model)
    chat_ids(tokenizer, [{"role": "user", "content": ""}])  # refuses a model without a template
    options = common.sampling_options(args, model)
    options["prefill_step"] = args.prefill_step
    chat = Chat(Session(model, tokenizer, system=args.system), options)
    if sys.stdin.isatty():
        common.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends")
    for line in _lines():
        if not chat.take(line):
            break
    return 0


class Chat:
    """The commands and answers of one conversation at the terminal."""

    def __init__(self, conversation: "Session", options: dict[str, Any]):
        self.conversation = conversation
        self.options = options
        self.last: Statistics | None = None

    def take(self, line: str) -> bool:
        """Act on one line of input; False to end."""
        line = line.strip()
        if line == "/exit":
            return False
        if not line:
            return True
        if not line.startswith("/"):
            self.answer(line)
        elif line == "/help":
            common.note(HELP)
        elif line == "/reset":
            self.conversation.reset()
            self.last = None
            common.note("the conversation is forgotten")
        elif line == "/stats":
            self.show_statistics()
        else:
            common.note(f"no command {line.split()[0]}: /help lists them")
        return True

    def answer(self, text: str) -> None:
        """Stream the answer to one message. A mistake or a stop keeps the conversation."""
        from mlx_kda.generate import Statistics

        statistics = Statistics()
        with stop_on_interrupt() as stopped, common.progress("reading") as bar:

            def update(done: int, total: int) -> None:
                bar(done, total)
                if stopped():
                    raise _Stopped

            try:
                pieces = self.conversation.send(
                    text, progress=update, statistics=statistics, **self.options
                )
                for piece in pieces:
                    common.write(piece.text)
                    if stopped():
                        break
                pieces.close()
            except _Stopped:
                pass
            except UserError as error:
                common.note(f"mlx-kda: {error}")
                return
            if stopped():
                statistics.finish_reason = "interrupted"
        common.write("\n")
        if statistics.finish_reason == "interrupted":
            common.note("(stopped)")
        self.last = statistics

    def show_statistics(self) -> None:
        context = self.conversation.context
        limit = f" of {context.limit:,}" if context.limit else ""
        for line in common.describe(self.last) if self.last else ["nothing answered yet"]:
            common.note(line)
        common.note(f"context: {len(context.tokens):,} tokens{limit}")


class _Stopped(Exception):
    """Ctrl-C while the prompt was being read, at the end of a chunk."""


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C into a flag, so that no step is left half done; a second one interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    seen = False

    def handle(signum: int, frame: Any) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """Lines of input until its end; with a prompt and line editing at a terminal."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() edits lines and remembers them once imported)
    while True:
        try:
            yield input("> ")
        except EOFError:
            common.note("")
            return
        except KeyboardInterrupt:
            common.note("\n(/exit or Ctrl-D ends)")
