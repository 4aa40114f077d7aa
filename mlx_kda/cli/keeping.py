"""The file of a session while a command runs: saved now and then, and never over another's work."""

import itertools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_kda.cli.output import note
from mlx_kda.errors import UserError

if TYPE_CHECKING:
    from mlx_kda.session import Session

# What saving in the middle of a conversation may take: of the time, and bytes written a second. A
# long text's file is gigabytes, which a disk should not be given after every turn.
SHARE, RATE = 0.05, 1e6


class Keeper:
    """Saves a session to its file; ``path`` None: nowhere.

    Another program may have written the file meanwhile: then the session goes to a file beside it.
    """

    def __init__(self, path: str | None):
        self.path = None if path is None else Path(path)
        self._seen = self._stamp()
        self._took, self._at = 0.0, time.monotonic()

    def save(self, session: "Session") -> None:
        """Save now. Raises UserError where that cannot be."""
        if self.path is None:
            return
        if self._stamp() not in (None, self._seen):
            other = self._beside()
            note(f"{self.path} was written by another program meanwhile: this is kept as {other}")
            self.path = other
        start = time.monotonic()
        session.save(self.path)
        self._at = time.monotonic()
        self._took, self._seen = self._at - start, self._stamp()

    def now_and_then(self, session: "Session") -> bool:
        """Save in the middle of a conversation, unless that would take too much of the time.

        Whether it was saved; a mistake is told and the conversation goes on.
        """
        written = self._seen[1] if self._seen else 0
        if time.monotonic() - self._at < max(self._took / SHARE, written / RATE):
            return False
        try:
            self.save(session)
        except UserError as error:
            note(f"mlx-kda: {error}")
            return False
        return True

    def _stamp(self) -> tuple[int, int, int] | None:
        """What tells one content of the file from another; None where there is no file."""
        if self.path is None:
            return None
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _beside(self) -> Path:
        """A name that nothing has yet."""
        stem, suffix = self.path.stem, self.path.suffix
        names = (self.path.with_name(f"{stem}-{n}{suffix}") for n in itertools.count(2))
        return next(name for name in names if not name.exists())
