"""A bucket in the memory of this process, for tests and for trying things out; gone when the process ends."""

import hashlib
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Lock

from fsspec.implementations.memory import MemoryFileSystem

from artifacts.bucket import CHUNK, KeyChanged, NoSuchKey, Sent, damaged_source

_LOCK = Lock()


class MemoryBucket:
    """Keys below a `memory://` URL, shared by all threads; the version of a value is the value."""

    def __init__(self, url: str) -> None:
        self._files = MemoryFileSystem()
        self._root = "/" + url.removeprefix("memory://").strip("/") + "/"

    def read(self, key: str) -> tuple[bytes, bytes] | None:
        found = self._get(key)
        return None if found is None else (found, found)

    def stream(self, key: str, start: int) -> Iterator[bytes]:
        data = self._get(key)
        if data is None:
            raise NoSuchKey(key)
        for offset in range(start, len(data), CHUNK):
            yield data[offset : offset + CHUNK]

    def create(self, key: str, data: bytes) -> None:
        self.swap(key, data, None)

    def swap(self, key: str, data: bytes, version: bytes | None) -> None:
        with _LOCK:
            if self._get(key) != version:
                raise KeyChanged(key)
            self.write(key, data)

    def write(self, key: str, data: bytes) -> None:
        self._files.pipe_file(self._root + key, data)

    def upload(self, key: str, path: Path, digest: str, sent: Sent) -> None:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise damaged_source(path, digest)
        self.write(key, data)
        sent(len(data))

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        for path, about in self._files.find(self._root, detail=True).items():
            if path.startswith(self._root + prefix):
                yield path.removeprefix(self._root), about["size"]

    def remove(self, key: str) -> None:
        with _LOCK:
            if self._files.exists(self._root + key):
                self._files.rm_file(self._root + key)

    def keep(self, keys: Collection[str]) -> list[str]:
        return []  # nobody collects garbage here

    def writers_lock(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _get(self, key: str) -> bytes | None:
        try:
            return self._files.cat_file(self._root + key)
        except FileNotFoundError:
            return None
