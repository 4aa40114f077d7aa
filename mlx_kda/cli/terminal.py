"""The lines of a chat, from a terminal (by prompt_toolkit if it is installed) or a pipe."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import output

if TYPE_CHECKING:
    from ..generate import Statistics
    from .chat_commands import Chat

PROMPT = "> "
MORE = ". "


class Terminal:
    """Reads the lines of a chat.

    A terminal has a prompt, editing and history; with prompt_toolkit (the extra ``chat``) also
    messages of several lines. A line that ends with a backslash continues on the next.

    Args:
        history: earlier messages.
    """

    def __init__(self, history: list[str]):
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._draft = ""
        self._shown: Statistics | None = None  # of the answer whose status was shown last
        self._prompt = _prompt_session(history) if self.interactive else None
        if self.interactive and self._prompt is None:
            with contextlib.suppress(ImportError):
                import readline  # input() edits lines and keeps a history once it is imported

                for text in history:
                    readline.add_history(text.replace("\n", " "))

    def lines(self) -> Iterator[str]:
        """Messages and commands until the end of input, without broken characters."""
        if not self.interactive:
            yield from _joined(_repaired(line.rstrip("\n")) for line in sys.stdin)
            return
        while True:
            draft, self._draft = self._draft, ""
            try:
                if self._prompt is None:
                    yield _repaired(_read(draft))
                else:
                    yield _repaired(self._prompt.prompt(PROMPT, default=draft))
            except EOFError:
                output.note("")
                return
            except KeyboardInterrupt:
                output.note("(/exit or Ctrl-D ends the chat)")

    def show_status(self, chat: "Chat") -> None:
        """Show the status after an answer, and take over what the next line begins with."""
        self._draft, chat.draft = chat.draft, ""
        if self.interactive and chat.last is not None and chat.last is not self._shown:
            output.note(f"[{chat.status()}]")
        self._shown = chat.last


def _read(draft: str) -> str:
    """A message by ``input``, which begins with ``draft`` to be edited."""
    with _prefilled(draft):
        lines = [input(PROMPT)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(MORE))
    return "\n".join(lines)


def _repaired(line: str) -> str:
    """The line with a replacement character for each byte that is not UTF-8.

    Such bytes arrive as lone surrogates, which cannot be encoded.
    """
    return line.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _joined(lines: Iterator[str]) -> Iterator[str]:
    """Lines, each that ends with a backslash joined with the next."""
    held: list[str] = []
    for line in lines:
        if line.endswith("\\"):
            held.append(line[:-1])
            continue
        yield "\n".join([*held, line])
        held = []
    if held:
        yield "\n".join(held)


@contextlib.contextmanager
def _prefilled(text: str) -> Iterator[None]:
    """Let input() begin with text to edit, if readline is available."""
    try:
        import readline
    except ImportError:
        yield
        return
    readline.set_startup_hook(lambda: readline.insert_text(text.replace("\n", " ")))
    try:
        yield
    finally:
        readline.set_startup_hook(None)


def _prompt_session(history: list[str]) -> Any:
    """A prompt of prompt_toolkit; None if it is not installed or the terminal has no cursor."""
    if not output.has_cursor(sys.stdout):
        return None
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.keys import Keys
        from prompt_toolkit.output.color_depth import ColorDepth
        from prompt_toolkit.output.vt100 import Vt100_Output
    except ImportError:
        return None
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line.endswith("\\") and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add(Keys.Vt100MouseEvent)
    def _(event: Any) -> None:
        """Ignore mouse events: a pasted colour sequence would be taken for one, and fail."""

    # The cursor's position is not needed, and not every terminal reports it.
    colours = ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None
    screen = Vt100_Output.from_pty(sys.stdout, os.environ.get("TERM"), colours)
    screen.enable_cpr = False
    return PromptSession(
        output=screen,
        multiline=True,
        key_bindings=keys,
        history=InMemoryHistory(history),
        prompt_continuation=lambda width, line, wrapped: MORE,
    )
