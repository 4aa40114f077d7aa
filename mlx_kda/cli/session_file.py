"""The file that a command keeps a session in, saved during a chat and locked meanwhile."""

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

# Limits of saving during a chat: share of the time, and bytes per second on average. The file of a
# long context is gigabytes, too much to write after every turn.
SHARE, RATE = 0.05, 1e6


def check_session_file(path: str | None) -> bool:
    """Whether a session's file exists; UserError if it is no session or cannot be written."""
    check_writable(path, "--session")
    if path is None or not Path(path).exists():
        return False
    check_session(path)
    return True


class SessionFile:
    """The file of a session, locked against other programs until ``close``; no file if None.

    A program that does not know the lock may still have written the file meanwhile. Then the
    session is saved under another name.

    Raises:
        UserError: another program has the file open, or its folder cannot be written.
    """

    def __init__(self, path: str | Path | None):
        self.path = None if path is None else Path(path)
        self._lock: Lock | None = None
        if self.path is not None and not self._acquire(self.path):
            raise UserError(
                f"{self.path} is in use by another mlx-kda: end that one, or name another file"
            )
        self._seen = self._stamp()
        self._took, self._at = 0.0, time.monotonic()

    @property
    def exists(self) -> bool:
        """Whether the file existed when it was opened or last saved."""
        return self._seen is not None

    def is_at(self, path: Path) -> bool:
        """Whether this is the file at a path."""
        return self.path is not None and self.path.resolve() == path.resolve()

    def __enter__(self) -> "SessionFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def save(self, session: "Session") -> None:
        """Save now. Raises UserError if that fails."""
        if self.path is None:
            return
        if self._stamp() not in (None, self._seen):
            changed, self.path = self.path, self._lock_new_name(self.path)
            note(f"{changed} was changed by another program: saving to {self.path} instead")
        start = time.monotonic()
        try:
            session.save(self.path)
        finally:  # also after a failure: a full disk is not filled again after every turn
            self._at = time.monotonic()
            self._took = self._at - start
        self._seen = self._stamp()

    def save_if_due(self, session: "Session") -> bool:
        """Save unless that would take too much time; whether it was saved. Failures are noted."""
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
        """Inode, size and time of the file, which show whether it was changed; None if missing."""
        try:
            found = os.stat(self.path) if self.path is not None else None
        except OSError:
            return None
        return found and (found.st_ino, found.st_size, found.st_mtime_ns)

    def _lock_new_name(self, path: Path) -> Path:
        """A path beside ``path`` that does not exist yet, locked."""
        names = (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in itertools.count(2))
        return next(name for name in names if not name.exists() and self._acquire(name))

    def _acquire(self, path: Path) -> bool:
        """Whether the lock of a path could be taken; the lock of the old path is released then."""
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
