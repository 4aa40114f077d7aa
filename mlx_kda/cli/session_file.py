"""The file of a session while a command runs: saved now and then, and never over another's work."""

import itertools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..cache.session_format import check_session
from ..errors import UserError
from ..files import Lock, try_lock
from .loading import check_writable
from .output import note

if TYPE_CHECKING:
    from ..session import Session

# What saving in the middle of a conversation may take: of the time, and bytes written a second. A
# long text's file is gigabytes, which a disk should not be given after every turn.
SHARE, RATE = 0.05, 1e6


def check_session_file(path: str | None, option: str = "--session") -> bool:
    """Whether a session's file exists; UserError if it is no session or cannot be written."""
    check_writable(path, option)
    if path is None or not Path(path).exists():
        return False
    check_session(path)
    return True


class Keeper:
    """Saves a session to its file, which is this program's until ``close``; ``path`` None: nowhere.

    A second program that is to keep a session there is refused, before it begins. What knows of no
    such rule may have written the file all the same: then the session goes to a file beside it.
    """

    def __init__(self, path: str | Path | None):
        """Raises UserError where another program keeps the file."""
        self.path = None if path is None else Path(path)
        self._lock: Lock | None = None
        if self.path is not None and not self._hold(self.path):
            raise UserError(
                f"{self.path} is in use by another mlx-kda: end that one, or name another file"
            )
        self._seen = self._stamp()
        self._took, self._at = 0.0, time.monotonic()

    @property
    def found(self) -> bool:
        """Whether there was a file when this was last looked at."""
        return self._seen is not None

    def keeps(self, path: Path) -> bool:
        """Whether this is the file."""
        return self.path is not None and self.path.resolve() == path.resolve()

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the file to others."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def save(self, session: "Session") -> None:
        """Save now. Raises UserError where that cannot be."""
        if self.path is None:
            return
        if self._stamp() not in (None, self._seen):
            written, self.path = self.path, self._beside()
            note(f"{written} was written by another program meanwhile: this is kept as {self.path}")
        start = time.monotonic()
        try:
            session.save(self.path)
        finally:  # a disk that is full after gigabytes is not filled again after every turn
            self._at = time.monotonic()
            self._took = self._at - start
        self._seen = self._stamp()

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
        """A name that nothing has yet, held."""
        stem, suffix = self.path.stem, self.path.suffix
        names = (self.path.with_name(f"{stem}-{n}{suffix}") for n in itertools.count(2))
        return next(name for name in names if not name.exists() and self._hold(name))

    def _hold(self, path: Path) -> bool:
        """Whether the file is this program's now, and no longer the one that was."""
        file = path.resolve()
        try:
            lock = try_lock(file.with_name(f".{file.name}.lock"))
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from error
        if lock is None:
            return False
        self.close()
        self._lock = lock
        return True
