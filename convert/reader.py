"""Reading ahead: tensors are read and hashed in a thread while the steps compute."""

import hashlib
import threading
from collections import deque
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from .background import WAITING_BYTES
from .tensor_files import Stored, as_array, read_bytes


class Reader:
    """Reads tensors in a thread ahead of the steps that want them, and hashes what it reads.

    ``tensors`` says where each is, ``names`` in which order they will be wanted. Calling it with a
    name gives the array, once; a name that is not listed, or wanted again, is read there and then.
    ``digests`` holds the SHA-256 of the bytes of every tensor that was read ahead.
    """

    def __init__(
        self, tensors: dict[str, Stored], names: Iterable[str], ahead: int = WAITING_BYTES
    ) -> None:
        self.digests: dict[str, str] = {}
        self._tensors, self._ahead = tensors, ahead
        self._order = deque(dict.fromkeys(names))
        self._left = set(self._order)
        self._ready: dict[str, np.ndarray | BaseException] = {}
        self._bytes, self._wanted, self._closed = 0, False, False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join()

    def __call__(self, name: str) -> mx.array:
        stored = self._tensors[name]
        with self._change:
            if name not in self._left:
                data = None
            else:
                self._wanted = True
                self._change.notify_all()
                while name not in self._ready:
                    self._change.wait()
                self._wanted = False
                data = self._ready.pop(name)
                self._left.discard(name)
                self._bytes -= stored.nbytes
                self._change.notify_all()
        if isinstance(data, BaseException):
            raise data
        return as_array(stored, read_bytes(stored) if data is None else data)

    def _run(self) -> None:
        for name in self._order:
            stored = self._tensors[name]
            with self._change:
                full = lambda size=stored.nbytes: (  # noqa: E731
                    self._bytes and self._bytes + size > self._ahead and not self._wanted
                )
                while full() and not self._closed:
                    self._change.wait()
                if self._closed:
                    return
            try:
                data = read_bytes(stored)
                digest = hashlib.sha256(data).hexdigest()
            except BaseException as error:
                data, digest = error, ""
            with self._change:
                self.digests[name] = digest
                self._ready[name] = data
                self._bytes += stored.nbytes
                self._change.notify_all()
            if not digest:
                return
            del data
