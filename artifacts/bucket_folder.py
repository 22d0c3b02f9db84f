"""A bucket that is a local folder, a mounted one included: written with the store's own primitives.

fsspec's local files look first and write then, so two writers can both believe that they were first. Here a
name is created by a hard link, and tags move under the store's own lock.
"""

import hashlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from artifacts.bucket import CHUNK, KeyChanged, NoSuchKey, Sent, damaged_source
from artifacts.disk_errors import reading, writing
from artifacts.files import make_folder, publish_new, staged, sync_folder
from artifacts.locking import StoreLock
from artifacts.store_folder import FOLDERS

_LOST_AND_FOUND = "lost+found"  # of a file system's own folder, which only root may read


class FolderBucket:
    """Keys as paths below a folder; the version of a value is the value."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = StoreLock(root)
        self._is_whole = False

    def read(self, key: str) -> tuple[bytes, bytes] | None:
        with reading(self._root), suppress(FileNotFoundError, NotADirectoryError):
            data = (self._root / key).read_bytes()
            return data, data
        return None

    def stream(self, key: str, start: int) -> Iterator[bytes]:
        with reading(self._root):
            try:
                stream = (self._root / key).open("rb")
            except FileNotFoundError as error:
                raise NoSuchKey(key) from error
            with stream:
                stream.seek(start)
                while chunk := stream.read(CHUNK):
                    yield chunk

    def create(self, key: str, data: bytes) -> None:
        with self._staged(data) as temporary:
            try:
                publish_new(temporary, self._root / key, sync=True)
            except FileExistsError as error:
                raise KeyChanged(key) from error

    def swap(self, key: str, data: bytes, version: bytes) -> None:
        with self._lock.tags():
            if self.read(key) != (version, version):
                raise KeyChanged(key)
            self.write(key, data)

    def write(self, key: str, data: bytes) -> None:
        with self._staged(data) as temporary:
            self._replace(temporary, self._root / key)

    def upload(self, key: str, path: Path, digest: str, sent: Sent) -> None:
        hasher = hashlib.sha256()
        with (
            path.open("rb") as source,
            writing(self._root),
            staged(self._root, _copied(source, hasher, sent), sync=True) as temporary,
        ):
            if hasher.hexdigest() != digest:
                raise damaged_source(path, digest)
            self._replace(temporary, self._root / key)  # what is there is of another size, so damaged

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        folder = self._root / prefix.rpartition("/")[0]
        with reading(self._root):
            for parent, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
                if Path(parent) == self._root:
                    folders[:] = set(folders) - {_LOST_AND_FOUND}
                for name in names:
                    path = Path(parent) / name
                    key = path.relative_to(self._root).as_posix()
                    if key.startswith(prefix) and (size := _size(path)) is not None:
                        yield key, size

    def remove(self, key: str) -> None:
        with writing(self._root):
            (self._root / key).unlink(missing_ok=True)

    def keep(self, keys: Collection[str]) -> list[str]:
        with writing(self._root):
            for folder in {(self._root / key).parent for key in keys}:
                with suppress(FileNotFoundError):  # with all that was in it
                    sync_folder(folder)
            return [key for key in keys if not (self._root / key).exists()]

    @contextmanager
    def writers_lock(self) -> Iterator[None]:
        if not self._is_whole:  # as any store in a folder is, which it can be used as
            with writing(self._root):
                for folder in FOLDERS:
                    make_folder(self._root / folder, sync=True)
            self._is_whole = True
        with self._lock.shared():
            yield

    @contextmanager
    def _staged(self, data: bytes) -> Iterator[Path]:
        with writing(self._root):
            make_folder(self._root, sync=True)
            with staged(self._root, data, sync=True) as temporary:
                yield temporary

    def _replace(self, temporary: Path, path: Path) -> None:
        make_folder(path.parent, sync=True)
        os.replace(temporary, path)
        sync_folder(path.parent)


def _refuse(error: OSError) -> None:
    """Raise what keeps a folder from being listed, unless it is not there; a link to nothing is there."""
    if not isinstance(error, FileNotFoundError) or os.path.islink(error.filename):
        raise error


def _size(path: Path) -> int | None:
    """The size of a file, or None if it has been removed meanwhile."""
    try:
        return path.stat().st_size
    except OSError as error:
        _refuse(error)
        return None


def _copied(source: BinaryIO, hasher: "hashlib._Hash", sent: Sent) -> Iterator[bytes]:
    while chunk := source.read(CHUNK):
        hasher.update(chunk)
        yield chunk
        sent(len(chunk))
