"""Lines from a person or a pipe: prompt_toolkit where it is installed, else plain input."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import output

if TYPE_CHECKING:
    from ..generate import Statistics
    from .chat_commands import Talk

PROMPT = "> "
MORE = ". "


class Terminal:
    """Where the lines of a chat come from.

    At a terminal there is a prompt, editing and history; with prompt_toolkit (the extra ``chat``)
    messages of several lines too. A line that ends with a backslash goes on.
    """

    def __init__(self, said: list[str]):
        """``said`` are messages for the history."""
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._draft = ""
        self._told: Statistics | None = None  # of the answer whose status was shown
        self._session = _prompt_session(said) if self.interactive else None
        if self.interactive and self._session is None:
            with contextlib.suppress(ImportError):
                import readline  # (input() edits lines and remembers them once imported)

                for text in said:
                    readline.add_history(text.replace("\n", " "))

    def lines(self) -> Iterator[str]:
        """Messages and commands until the end of input, whole characters all of them."""
        if not self.interactive:
            yield from _joined(_whole(line.rstrip("\n")) for line in sys.stdin)
            return
        read = self._plain if self._session is None else self._edited
        while True:
            try:
                yield _whole(read())
            except EOFError:
                output.note("")
                return
            except KeyboardInterrupt:
                output.note("(/exit or Ctrl-D ends)")

    def after(self, talk: "Talk") -> None:
        """What is shown and kept between two lines."""
        self._draft, talk.draft = talk.draft, ""
        if self.interactive and talk.last is not None and talk.last is not self._told:
            output.note(f"[{talk.status()}]")
        self._told = talk.last

    def _edited(self) -> str:
        default, self._draft = self._draft, ""
        return self._session.prompt(PROMPT, default=default)

    def _plain(self) -> str:
        default, self._draft = self._draft, ""
        with _prefilled(default):
            line = input(PROMPT)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(MORE))
        return "\n".join(lines)


def _whole(line: str) -> str:
    """The line with a replacement character for each byte that is no part of a character.

    Readers of a terminal give such bytes as lone surrogates, which nothing can encode.
    """
    return line.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _joined(lines: Iterator[str]) -> Iterator[str]:
    """Lines, those that end with a backslash together with the next."""
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
    """Let input() begin with a text to change, where readline can."""
    try:
        import readline
    except ImportError:
        readline = None
    if not text or readline is None:
        yield
        return
    readline.set_startup_hook(lambda: readline.insert_text(text.replace("\n", " ")))
    try:
        yield
    finally:
        readline.set_startup_hook(None)


def _prompt_session(said: list[str]) -> Any:
    """prompt_toolkit's, or None where it is not installed or the terminal cannot show it."""
    if not output.moves(sys.stdout):
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
        """Nothing: the mouse is not used, and a pasted colour would be taken for it, and fail."""

    # Nothing here needs to know the cursor's place, and not every terminal tells it.
    colours = ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None
    screen = Vt100_Output.from_pty(sys.stdout, os.environ.get("TERM"), colours)
    screen.enable_cpr = False
    return PromptSession(
        output=screen,
        multiline=True,
        key_bindings=keys,
        history=InMemoryHistory(said),
        prompt_continuation=lambda width, line, wrapped: MORE,
    )
