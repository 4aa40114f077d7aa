"""Checkpoints to read from: a local folder, or a repository of the Hugging Face hub.

Only configs, tokenizer files and safetensors are ever downloaded or opened: no Python, no pickles.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, UserError
from ..format import listed
from .folders import INDEX, find_folder, read_config, read_json, refuse_without_weights
from .safetensors import Bytes, StoredTensor, as_array, read_bytes, read_header, read_tensor
from .safetensors_writer import WAITING_BYTES

SAMPLE = 65_536


@dataclass
class CheckpointSource:
    """A checkpoint folder with its config and the headers of its weight files."""

    name: str  # as the user gave it: a path, or a hub id
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    revision: str | None = None
    fetch: Callable[[Path], None] | None = None  # downloads a weight file

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(stored.nbytes for stored in self.tensors.values())

    @property
    def missing(self) -> list[Path]:
        """Weight files that are still to be downloaded."""
        files = {stored.file for stored in self.tensors.values()}
        return sorted(file for file in files if self.fetch and not file.exists())

    @property
    def download_bytes(self) -> int:
        """Bytes of tensors in those files."""
        missing = set(self.missing)
        return sum(stored.nbytes for stored in self.tensors.values() if stored.file in missing)

    def read(self, name: str) -> mx.array:
        """Read one tensor."""
        return read_tensor(self.tensors[name])

    def identity(self) -> dict[str, Any]:
        """What distinguishes this checkpoint from others, without reading it whole.

        The commit of a repository; of a folder, each file's size and a hash of its beginning,
        middle and end.
        """
        if self.revision is not None:
            return {"repository": self.name, "revision": self.revision}
        files = sorted({stored.file for stored in self.tensors.values()})
        return {file.name: _sampled(file) for file in (self.folder / "config.json", *files)}


def _sampled(file: Path) -> list[Any]:
    try:
        size = file.stat().st_size
        digest = hashlib.sha256()
        with file.open("rb") as handle:
            for place in (0, max(0, size - SAMPLE) // 2, max(0, size - SAMPLE)):
                handle.seek(place)
                digest.update(handle.read(SAMPLE))
    except OSError as error:
        raise CheckpointError(f"{file.name} cannot be read: {error.strerror}") from error
    return [size, digest.hexdigest()]


def open_source(
    source: str | Path, revision: str | None = None, *, download: bool = True
) -> CheckpointSource:
    """Open a checkpoint by its folder or hub id, reading configs and headers only.

    With ``download`` false only the headers of a hub id's weight files are read, and the source's
    ``fetch`` downloads a file when it is needed.

    Raises UserError or CheckpointError: no such folder, the hub cannot be reached, no checkpoint in
    it, a missing, truncated or damaged file, a tensor stored twice.
    """
    folder = find_folder(source)
    if folder is None:
        from . import hub  # imports huggingface_hub, which takes longer than the rest

        return hub.open_repository(str(source), revision, download)
    if revision is not None:
        raise UserError(f"--revision is for hub ids, and {source} is a local folder: leave it out")
    return CheckpointSource(str(source), folder, read_config(folder), read_tensors(folder))


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's weight files, by name; only headers are read.

    Those are the files of the index, which must hold what it says; without an index
    model*.safetensors, or else any safetensors.
    """
    placed = read_placed(folder)
    if placed:
        files = sorted({str(file) for file in placed.values()})
    else:
        found = [*folder.glob("model*.safetensors")] or [*folder.glob("*.safetensors")]
        files = sorted(path.name for path in found)
    if not files:
        refuse_without_weights(folder)
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise CheckpointError(f"{INDEX} names files that are missing: {listed(absent)}")

    return joined({file: read_header(folder / file) for file in files}, placed)


def read_placed(folder: Path) -> dict[str, str]:
    """Tensor name -> file name by a folder's index; empty if it has none."""
    index = folder / INDEX
    if not index.exists():
        return {}
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index} is damaged: it has no weight_map")
    if outside := [name for name in map(str, placed.values()) if Path(name).name != name]:
        raise CheckpointError(f"{INDEX} names a file outside the folder: {outside[0]}")
    return placed


def joined(
    headers: dict[str, dict[str, StoredTensor]], placed: dict[str, str]
) -> dict[str, StoredTensor]:
    """The tensors of all files; each must be stored once, where the index says."""
    tensors: dict[str, StoredTensor] = {}
    for file, header in headers.items():
        for name, stored in header.items():
            if name in tensors:
                raise CheckpointError(
                    f"{name} is stored twice, in {tensors[name].file.name} and in {file}"
                )
            tensors[name] = stored
    if lost := [name for name in placed if name not in tensors]:
        raise CheckpointError(f"{INDEX} names tensors that no file holds: {listed(lost)}")
    if strays := [name for name, file in placed.items() if tensors[name].file.name != file]:
        raise CheckpointError(f"{INDEX} names the wrong file for {listed(strays)}")
    return tensors


class Reader:
    """Reads tensors in a thread, ahead of the steps that need them, and hashes them.

    ``names`` is the order in which they will be needed; at most ``ahead`` bytes (or one tensor) are
    read ahead. Calling the reader with a name returns the array; a name that is not listed, or is
    asked for again, is read at once. ``digests`` holds the SHA-256 of every listed tensor's bytes.
    """

    def __init__(self, source: CheckpointSource, names: Iterable[str], ahead: int = WAITING_BYTES):
        self.digests: dict[str, str] = {}
        self._source, self._ahead = source, ahead
        self._order = list(dict.fromkeys(names))
        self._left = set(self._order)
        self._ready: dict[str, Bytes] = {}
        self._bytes, self._wanted, self._closed = 0, False, False
        self._error: BaseException | None = None
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join(timeout=5)  # a download may take longer; it ends with the process

    def __call__(self, name: str) -> mx.array:
        data = self._take(name) if name in self._left else self._read(name)
        return as_array(self._source.tensors[name], data)

    def _take(self, name: str) -> Bytes:
        with self._change:
            self._wanted = True
            self._change.notify_all()
            while name not in self._ready:
                if self._error:
                    raise self._error
                self._change.wait()
            self._wanted = False
            self._left.discard(name)
            data = self._ready.pop(name)
            self._bytes -= len(data)
            self._change.notify_all()
        return data

    def _read(self, name: str) -> Bytes:
        file = self._source.tensors[name].file
        if self._source.fetch and not file.exists():
            self._source.fetch(file)
        return read_bytes(self._source.tensors[name])

    def _is_full(self, more: int) -> bool:
        return self._bytes > 0 and self._bytes + more > self._ahead and not self._wanted

    def _run(self) -> None:
        try:
            for name in self._order:
                with self._change:
                    while self._is_full(self._source.tensors[name].nbytes) and not self._closed:
                        self._change.wait()
                    if self._closed:
                        return
                data = self._read(name)
                self.digests[name] = hashlib.sha256(data.data).hexdigest()
                with self._change:
                    self._ready[name] = data
                    self._bytes += len(data)
                    self._change.notify_all()
                del data
        except BaseException as error:
            with self._change:
                self._error = error
                self._change.notify_all()
