"""Reading ahead: tensors are read and hashed in a thread while the steps compute."""

import hashlib
import threading
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from .background import WAITING_BYTES
from .source import Source
from .tensor_files import as_array, read_bytes


class Reader:
    """Reads tensors in a thread ahead of the steps that want them, and hashes what it reads.

    ``names`` says in which order they will be wanted. Calling it with a name gives the array,
    once; a name that is not listed, or is wanted again, is read there and then. ``digests`` holds
    the SHA-256 of the bytes of every listed tensor that was read.
    """

    def __init__(self, source: Source, names: Iterable[str], ahead: int = WAITING_BYTES):
        self.digests: dict[str, str] = {}
        self._source, self._ahead = source, ahead
        self._order = list(dict.fromkeys(names))
        self._left = set(self._order)
        self._ready: dict[str, np.ndarray] = {}
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
        self._thread.join(timeout=5)  # longer in a download: it ends with the process

    def __call__(self, name: str) -> mx.array:
        data = self._take(name) if name in self._left else self._read(name)
        return as_array(self._source.tensors[name], data)

    def _take(self, name: str) -> np.ndarray:
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

    def _read(self, name: str) -> np.ndarray:
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
                self.digests[name] = hashlib.sha256(data).hexdigest()
                with self._change:
                    self._ready[name] = data
                    self._bytes += len(data)
                    self._change.notify_all()
                del data
        except BaseException as error:
            with self._change:
                self._error = error
                self._change.notify_all()
