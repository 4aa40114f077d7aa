"""What `mlx-kda chat` does with a line: messages, and commands that begin with /."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..format import size
from . import output, reports
from .options import Parser, add_sampling
from .session_file import Keeper
from .signals import Stopped, stopping

if TYPE_CHECKING:
    from ..generate import Piece, Statistics
    from ..session import Session

HELP = """\
/undo            take back the last message and its answer
/regen           answer the last message again
/edit [TEXT]     put TEXT in place of the last message; without TEXT, change it on the next line
/fork [NAME]     keep the conversation as it is and go on in a copy
/switch [NAME]   go to a conversation that was kept; without NAME, list them
/save FILE       write the session to a file
/load FILE       go on with the session of a file
/system [TEXT]   another system message; without TEXT, none
/set [NAME VALUE]  set an option: max-tokens, temp, top-p, top-k, min-p, seed, ...; without,
                 show them
/stats           tokens, tokens/s and memory of the last answer, and the context used
/reset           forget the conversation (the system message stays)
//TEXT           a message that begins with /
/help            this list
/exit            end; so does the end of input (Ctrl-D)"""

Options = Callable[[argparse.Namespace, Any], dict[str, Any]]


class Talk:
    """The conversations of one chat, and the one that is spoken in now."""

    def __init__(self, session: "Session", options: Options, keeper: Keeper | None = None):
        """``keeper`` has the file that the conversation is kept in."""
        self.session = session
        self._keeper = keeper or Keeper(None)
        self._unsaved = True
        self.name = "main"
        self.kept: dict[str, Session] = {}
        self.last: Statistics | None = None
        self.draft = ""  # what the next line begins with, after /edit
        self.ended: int | None = None  # the exit status of a signal that ends the chat
        self._options = options
        parser = Parser(add_help=False)
        add_sampling(parser)
        self._parser = parser
        self.settings = parser.parse_args([])

    def set_options(self, values: dict[str, Any]) -> None:
        """Take the sampling options among ``values``."""
        vars(self.settings).update({k: v for k, v in values.items() if k in vars(self.settings)})

    def keep(self, *, at_end: bool = False) -> None:
        """Save what was said since, if that is wanted; in between not all of the time."""
        if not self._unsaved:
            return
        with stopping() as stop:  # a Ctrl-C does not cut it short, a second one does
            if at_end:
                self._keeper.save(self.session)
                self._tell_lost()
            self._unsaved = not at_end and not self._keeper.now_and_then(self.session)
        if stop.ends:
            self.ended = stop.status

    def _tell_lost(self) -> None:
        """A session's file holds one conversation: name those that end here."""
        if self.kept and self._keeper.path is not None:
            names = ", ".join(map(repr, self.kept))
            output.note(f"{self._keeper.path} keeps {self.name!r}; not kept: {names}")

    def take(self, line: str) -> bool:
        """Act on one line of input; False to end."""
        line = line.strip()
        if not line:
            return True
        self._unsaved = True
        if not line.startswith("/") or line.startswith("//"):
            text = line.removeprefix("/") if line.startswith("//") else line
            self._answer(lambda **options: self.session.send(text, **options))
            return self.ended is None
        word, _, rest = line[1:].partition(" ")
        if word == "exit":
            return False
        command = getattr(self, f"_{word}_command", None)
        if command is None:
            output.note(f"no command /{word}: /help lists them, and //{word} is a message")
            return True
        try:
            command(rest.strip())
        except UserError as error:
            output.note(f"mlx-kda: {error}")
        return self.ended is None

    @property
    def said(self) -> list[str]:
        """The user's messages so far."""
        return [m["content"] for m in self.session.messages if m["role"] == "user"]

    def status(self) -> str:
        """One line: speed, context, memory, and what the last turn had to read."""
        context, last = self.session.context, self.last
        answered = last is not None and last.generation_tokens
        parts = [f"{last.generation_tps:.1f} tokens/s"] if answered else []
        limit = f" of {context.limit:,}" if context.limit else ""
        parts.append(f"context {len(context.tokens):,}{limit}")
        held = context.nbytes + context.checkpoints.nbytes
        peak = "" if last is None else f", peak {size(last.peak_memory)}"
        parts.append(f"cache {size(held)}{peak}")
        if last is not None:
            parts.append(
                f"this turn: {last.reused_tokens:,} re-used, {last.prefilled_tokens:,} prefilled"
            )
        return " | ".join(([self.name] if self.kept else []) + parts)

    def _answer(self, start: "Callable[..., Iterator[Piece]]") -> None:
        """Stream an answer. A mistake or a stop keeps the conversation."""
        from ..generate import Statistics

        statistics = Statistics()
        with stopping() as stop, output.progress("reading") as bar:
            try:
                pieces = start(
                    progress=stop.watch(bar),
                    prefill_step=self.settings.prefill_step,
                    statistics=statistics,
                    **self._options(self.settings, self.session.context.model),
                )
                for piece in pieces:
                    output.write(piece.text)
                    if stop:
                        break
                pieces.close()
            except Stopped:
                pass
            except UserError as error:
                if statistics.generation_tokens:
                    output.write("\n")
                output.note(f"mlx-kda: {error}")
                return
            if stop:
                statistics.finish_reason = "interrupted"
            self.ended = stop.status if stop.ends else None
        output.write("\n")
        if statistics.finish_reason == "interrupted":
            reading = not statistics.generation_tokens
            output.note("(stopped while reading: /undo takes it back)" if reading else "(stopped)")
        self.last = statistics

    def _help_command(self, rest: str) -> None:
        output.note(HELP)

    def _reset_command(self, rest: str) -> None:
        self.session.reset()
        self.last = None
        output.note("the conversation is forgotten")

    def _undo_command(self, rest: str) -> None:
        text = self.session.undo()
        output.note("there is nothing to take back" if text is None else f"took back: {text}")

    def _regen_command(self, rest: str) -> None:
        self._answer(self.session.regenerate)

    def _edit_command(self, rest: str) -> None:
        if not self.said:
            raise UserError("there is no message to edit yet")
        text = self.session.undo()
        if rest:
            self._answer(lambda **options: self.session.send(rest, **options))
        else:
            self.draft = text
            output.note(f"took back: {text}")

    def _fork_command(self, rest: str) -> None:
        name = rest or f"fork {len(self.kept) + 1}"
        if name == self.name or name in self.kept:
            raise UserError(f"there is a conversation {name!r} already")
        fork = self.session.fork()
        self.kept[self.name] = self.session
        output.note(f"{self.name!r} is kept; this is {name!r} now (/switch goes back)")
        self.session, self.name = fork, name

    def _switch_command(self, rest: str) -> None:
        if not rest:
            for name in (self.name, *self.kept):
                session = self.session if name == self.name else self.kept[name]
                here = " (here)" if name == self.name else ""
                output.note(f"{name}: {len(session.context.tokens):,} tokens{here}")
            return
        if rest not in self.kept:
            raise UserError(f"there is no conversation {rest!r} to switch to")
        self.kept[self.name] = self.session
        self.session, self.name = self.kept.pop(rest), rest
        output.note(f"this is {rest!r}")

    def _save_command(self, rest: str) -> None:
        if not rest:
            raise UserError("name a file: /save FILE")
        file = Path(rest).expanduser()
        if self._keeper.keeps(file):
            self._keeper.save(self.session)
        else:
            with Keeper(file) as keeper:
                keeper.save(self.session)
        output.note(f"saved {rest}")

    def _load_command(self, rest: str) -> None:
        if not rest:
            raise UserError("name a file: /load FILE")
        session = self.session
        self.session = type(session).load(
            Path(rest).expanduser(),
            session.context.model,
            session.tokenizer,
            prefill_step=session.prefill_step,
        )
        self.last = None
        output.note(f"going on with {len(self.session.messages)} messages of {rest}")

    def _system_command(self, rest: str) -> None:
        self.session.set_system(rest or None)
        output.note("the system message is " + (f"now: {rest}" if rest else "left out"))

    def _set_command(self, rest: str) -> None:
        if not rest:
            for name, value in vars(self.settings).items():
                output.note(f"{name.replace('_', '-')} {_shown(value)}")
            return
        name, _, value = rest.replace("=", " ", 1).partition(" ")
        self._set(name.strip().lstrip("-").replace("_", "-"), value.strip())

    def _set(self, name: str, value: str) -> None:
        actions = {a.dest.replace("_", "-"): a for a in self._parser._actions}
        if name not in actions:
            raise UserError(f"no option {name}: there are {', '.join(actions)}")
        action = actions[name]
        if action.nargs == 0:
            words = {"on": True, "off": False}
            if value not in words:
                raise UserError(f"{name} is on or off, not {value!r}")
            parsed = words[value]
        elif value in ("none", "off"):
            parsed = action.default
        else:
            try:
                parsed = action.type(value)
            except argparse.ArgumentTypeError as error:
                raise UserError(f"{name}: {error}") from None
        setattr(self.settings, action.dest, parsed)
        output.note(f"{name} {_shown(parsed)}")

    def _stats_command(self, rest: str) -> None:
        context = self.session.context
        limit = f" of {context.limit:,}" if context.limit else ""
        for line in reports.describe(self.last) if self.last else ["nothing answered yet"]:
            output.note(line)
        output.note(f"context: {len(context.tokens):,} tokens{limit}")
        points = context.checkpoints
        output.note(f"session checkpoints: {len(points)}, {size(points.nbytes)}")
        for line in reports.describe_layers(self.session.layers(), len(context.tokens)):
            output.note(line)


def _shown(value: Any) -> str:
    """A setting as it is typed."""
    words = {None: "none", True: "on", False: "off"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
