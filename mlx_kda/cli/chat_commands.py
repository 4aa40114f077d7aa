"""What ``mlx-kda chat`` does with a line: sends a message, or runs a command that begins with /."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..format import size
from . import output, reports
from .options import Parser, add_sampling, sampling_options
from .session_file import SessionFile
from .signals import Stopped, stop_on_signals

if TYPE_CHECKING:
    from ..generate import Statistics
    from ..session import Pieces, Session

HELP = """\
/undo            remove the last message and its answer
/regen           answer the last message again
/edit [TEXT]     replace the last message by TEXT; without TEXT, edit it on the next line
/fork [NAME]     keep this conversation and continue in a copy of it
/switch [NAME]   switch to another conversation; without NAME, list them
/save FILE       save the session to a file
/load FILE       continue the session in a file
/system [TEXT]   set the system message; without TEXT, remove it
/set [NAME VALUE]  set an option: max-tokens, temp, top-p, top-k, min-p, seed, ...; without
                 NAME, list them
/stats           tokens, tokens/s and memory of the last answer, and the context used
/reset           start a new conversation (the system message stays)
//TEXT           send a message that begins with /
/help            this list
/exit            end the chat, as does end of input (Ctrl-D)"""


class Chat:
    """The conversations of one chat, and the one in use.

    Args:
        session: the first conversation.
        file: where the conversation in use is saved.
    """

    def __init__(self, session: "Session", file: SessionFile | None = None):
        self.session = session
        self.name = "main"
        self.others: dict[str, Session] = {}
        self.last: Statistics | None = None
        self.draft = ""  # what the next line begins with, after /edit
        self.exit_status: int | None = None  # of a signal that ends the chat
        self._file = file or SessionFile(None)
        self._unsaved = True
        self._parser = Parser(add_help=False)
        add_sampling(self._parser)
        self.settings = self._parser.parse_args([])

    def set_options(self, values: dict[str, Any]) -> None:
        """Take the sampling options among ``values``."""
        vars(self.settings).update({k: v for k, v in values.items() if k in vars(self.settings)})

    def save(self) -> None:
        """Save the conversation at the end of the chat, and name those that are lost."""
        if self._unsaved:
            with self._finish_on_signals():
                self._file.save(self.session)
                self._unsaved = False
        if self.others and self._file.path is not None:
            names = ", ".join(map(repr, self.others))
            output.note(f"{self._file.path} holds {self.name!r}; not saved: {names}")

    def save_if_due(self) -> None:
        """Save what is new during the chat, if the last time is long enough ago."""
        if self._unsaved:
            with self._finish_on_signals():
                self._unsaved = not self._file.save_if_due(self.session)

    @contextlib.contextmanager
    def _finish_on_signals(self) -> Iterator[None]:
        """Let a block finish after a signal; one that ends the chat sets ``exit_status``."""
        with stop_on_signals() as stop:
            yield
        if stop.ends:
            self.exit_status = stop.status

    def handle(self, line: str) -> bool:
        """Send a message or run a command; False ends the chat."""
        line = line.strip()
        if not line:
            return True
        self._unsaved = True
        if not line.startswith("/") or line.startswith("//"):
            self._send(line[1:] if line.startswith("//") else line)
            return self.exit_status is None
        word, _, rest = line[1:].partition(" ")
        if word == "exit":
            return False
        command = getattr(self, f"_{word}_command", None)
        if command is None:
            output.note(f"unknown command /{word}; /help lists them, //{word} sends a message")
            return True
        try:
            command(rest.strip())
        except UserError as error:
            output.note(f"mlx-kda: {error}")
        return self.exit_status is None

    @property
    def user_messages(self) -> list[str]:
        """The user's messages so far."""
        return [m["content"] for m in self.session.messages if m["role"] == "user"]

    def status(self) -> str:
        """One line: speed, context, memory, and the tokens that the last turn processed."""
        context, last = self.session.context, self.last
        parts = [self.name] if self.others else []
        if last is not None and last.generation_tokens:
            parts.append(f"{last.generation_tps:.1f} tokens/s")
        parts.append(f"context {self._context_used()}")
        cache = f"cache {size(context.nbytes + context.checkpoints.nbytes)}"
        parts.append(cache if last is None else f"{cache}, peak {size(last.peak_memory)}")
        if last is not None:
            parts.append(
                f"this turn: {last.reused_tokens:,} reused, {last.prefilled_tokens:,} prefilled"
            )
        return " | ".join(parts)

    def _context_used(self) -> str:
        context = self.session.context
        limit = f" of {context.limit:,}" if context.limit else ""
        return f"{len(context.tokens):,}{limit}"

    def _send(self, text: str) -> None:
        self._answer(lambda **options: self.session.send(text, **options))

    def _answer(self, start: "Callable[..., Pieces]") -> None:
        """Stream an answer. After an error or a signal the conversation is kept."""
        from ..generate import Statistics

        statistics = Statistics()
        with stop_on_signals() as stop, output.progress("reading") as bar:
            try:
                pieces = start(
                    progress=stop.watch(bar),
                    prefill_step=self.settings.prefill_step,
                    statistics=statistics,
                    **sampling_options(self.settings, self.session.context.model),
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
            self.exit_status = stop.status if stop.ends else None
        output.write("\n")
        if statistics.finish_reason == "interrupted":
            reading = not statistics.generation_tokens
            output.note(
                "(stopped while reading; /undo removes the message)" if reading else "(stopped)"
            )
        self.last = statistics

    def _help_command(self, rest: str) -> None:
        output.note(HELP)

    def _reset_command(self, rest: str) -> None:
        self.session.reset()
        self.last = None
        output.note("started a new conversation")

    def _undo_command(self, rest: str) -> None:
        text = self.session.undo()
        output.note("there is no message to remove" if text is None else f"removed: {text}")

    def _regen_command(self, rest: str) -> None:
        self._answer(self.session.regenerate)

    def _edit_command(self, rest: str) -> None:
        if not self.user_messages:
            raise UserError("there is no message to edit yet")
        text = self.session.undo()
        if rest:
            self._send(rest)
        else:
            self.draft = text or ""
            output.note(f"removed: {text}")

    def _fork_command(self, rest: str) -> None:
        name = rest or f"fork {len(self.others) + 1}"
        if name == self.name or name in self.others:
            raise UserError(f"a conversation {name!r} exists already: choose another name")
        fork = self.session.fork()
        self.others[self.name] = self.session
        output.note(f"now in {name!r}; /switch {self.name} returns to {self.name!r}")
        self.session, self.name = fork, name

    def _switch_command(self, rest: str) -> None:
        if not rest:
            for name in (self.name, *self.others):
                session = self.session if name == self.name else self.others[name]
                here = " (in use)" if name == self.name else ""
                output.note(f"{name}: {len(session.context.tokens):,} tokens{here}")
            return
        if rest not in self.others:
            raise UserError(f"there is no other conversation {rest!r}: /switch lists them")
        self.others[self.name] = self.session
        self.session, self.name = self.others.pop(rest), rest
        output.note(f"now in {rest!r}")

    def _save_command(self, rest: str) -> None:
        if not rest:
            raise UserError("name a file: /save FILE")
        file = Path(rest).expanduser()
        if self._file.is_at(file):
            self._file.save(self.session)
        else:
            with SessionFile(file) as other:
                other.save(self.session)
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
        output.note(f"continuing the {len(self.session.messages)} messages of {rest}")

    def _system_command(self, rest: str) -> None:
        self.session.set_system(rest or None)
        output.note(f"system message: {rest}" if rest else "system message removed")

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
            raise UserError(f"unknown option {name}: choose from {', '.join(actions)}")
        action = actions[name]
        parsed: Any
        if action.nargs == 0:
            words = {"on": True, "off": False}
            if value not in words:
                raise UserError(f"{name} is on or off, not {value!r}")
            parsed = words[value]
        elif value in ("none", "off") or not callable(action.type):
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
        for line in reports.describe(self.last) if self.last else ["no answer yet"]:
            output.note(line)
        output.note(f"context: {self._context_used()} tokens")
        points = context.checkpoints
        output.note(f"session checkpoints: {len(points)}, {size(points.nbytes)}")
        for line in reports.describe_layers(self.session.layers(), len(context.tokens)):
            output.note(line)


def _shown(value: Any) -> str:
    """A setting as it is typed."""
    words = {None: "none", True: "on", False: "off"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
