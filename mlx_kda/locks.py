"""Locks between processes: a file that one of them holds until it lets go, or ends in any way."""

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

ATTEMPTS = 50  # after which the file is taken as it is: some network disks number files anew
# What a file system says that has no locks. Two processes are then kept apart by nothing.
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}


def acquire(path: Path) -> BinaryIO | None:
    """The lock file at ``path``, made if need be and held while it is open; None: another has it.

    Raises OSError where it cannot be made.
    """
    for attempt in range(ATTEMPTS):
        handle = path.open("ab")
        try:
            if not try_lock(handle):
                handle.close()
                return None
            if is_at(path, handle) or attempt == ATTEMPTS - 1:
                return handle
        except BaseException:
            handle.close()
            raise
        handle.close()  # who held it before has removed it meanwhile
    return None


def release(path: Path, handle: BinaryIO) -> None:
    """Remove a lock file that is held, and let go of it."""
    with contextlib.suppress(OSError):
        if is_at(path, handle):
            path.unlink()
    handle.close()


def try_lock(handle: BinaryIO) -> bool:
    """Whether an open file is locked by this handle now; True where there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def is_at(path: Path, handle: BinaryIO) -> bool:
    """Whether the open file is the one that has this name."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(handle.fileno()))
