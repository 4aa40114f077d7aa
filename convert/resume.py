"""Records of an unfinished conversion, kept beside its files so that it can be resumed.

.resume.json             what is converted, from what, by which recipe
.NAME.done.json          for each finished weight file: bytes, SHA-256, a hash of its contents'
                         names and shapes, digests of its source tensors
.measured.jsonl          errors measured for a byte budget, one line per weight
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import write_text

BEGUN, MEASURED = ".resume.json", ".measured.jsonl"
FACTS = ("bytes", "sha256", "holds", "sources")  # of a finished weight file
BLOCK = 16_000_000


class ResumeState:
    """The records of one partial folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, dict[str, Any]] = {}  # finished weight files -> their facts

    @property
    def is_begun(self) -> bool:
        """Whether the folder holds finished work."""
        done = any(self.folder.glob(".*.done.json")) or (self.folder / MEASURED).is_file()
        return done and self._read(BEGUN) is not None

    def begin(self, identity: dict[str, Any]) -> None:
        """Record what is converted."""
        self._write(BEGUN, identity)

    def check(self, identity: dict[str, Any]) -> None:
        """Raise UserError if another source, recipe, shard size or version was begun here."""
        begun = self._read(BEGUN) or {}
        for key, value in identity.items():
            if begun.get(key) != value:
                shown = f": {begun.get(key)}, now {value}" if not isinstance(value, dict) else ""
                raise UserError(
                    f"{self.folder} was begun with another {key.replace('_', ' ')}{shown}; repeat "
                    "that command, or pass --overwrite to start again"
                )

    def take(self, wanted: dict[str, str], log: Callable[[str], None]) -> list[str]:
        """Take the finished files whose checksum is right; returns the names of the damaged ones.

        ``wanted`` is file name -> hash of what it is to contain.
        """
        damaged = []
        for name, contents in wanted.items():
            facts = self._read(_done(name))
            if facts is None:
                continue
            log(f"checking {name}")
            known = all(facts.get(fact) for fact in FACTS) and facts["holds"] == contents
            if known and file_hash(self.folder / name) == facts["sha256"]:
                self.files[name] = facts
            else:
                damaged.append(name)
                (self.folder / _done(name)).unlink()
        return damaged

    def record(self, name: str, facts: dict[str, Any]) -> None:
        """Record a finished weight file."""
        self.files[name] = facts
        self._write(_done(name), facts)

    def measured(self) -> dict[str, Any]:
        """Path -> the errors measured so far; a line that was cut short is skipped."""
        found = {}
        with contextlib.suppress(OSError):
            for line in (self.folder / MEASURED).read_text().splitlines():
                with contextlib.suppress(ValueError, TypeError):
                    path, errors = json.loads(line)
                    found[path] = errors
        return found

    def record_errors(self, path: str, errors: Any) -> None:
        """Record the errors measured for one weight."""
        with (self.folder / MEASURED).open("a") as file:
            file.write(json.dumps([path, errors]) + "\n")

    def clear(self, keep: set[str]) -> None:
        """Remove all files except these, the finished ones and the records."""
        for path in self.folder.iterdir():
            ours = path.name in (BEGUN, MEASURED) or path.name.endswith(".done.json")
            if not ours and path.name not in keep and path.name not in self.files:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def remove(self) -> None:
        """Remove the records, the one that says what was begun last."""
        for path in self.folder.glob(".*.done.json"):
            path.unlink(missing_ok=True)
        for name in (MEASURED, BEGUN):
            (self.folder / name).unlink(missing_ok=True)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        write_text(self.folder / name, json.dumps(content, indent=1))

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            content = json.loads((self.folder / name).read_text())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None


def _done(name: str) -> str:
    return f".{name}.done.json"


def file_hash(path: Path, on_read: Callable[[int], None] = lambda count: None) -> str | None:
    """SHA-256 of a file, None if it cannot be read; ``on_read`` gets the bytes of each block."""
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK):
                digest.update(block)
                on_read(len(block))
    except OSError:
        return None
    return digest.hexdigest()


def digest_of(digests: dict[str, str]) -> str:
    """SHA-256 over the lines "digest  name" of tensors, by name."""
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()
