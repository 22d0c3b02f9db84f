"""Content-addressed files: `objects/sha256/ab/<64 hex>`, each named by the SHA-256 of its bytes.

An object appears complete or not at all, is read-only and never changes. Publishing: write and hash a
temporary file, sync it, link it to its name, sync the folder, drop the temporary name. A name that exists
already holds the same bytes, written by somebody else, unless the disk has damaged it: then the damaged file
is kept under `quarantine/` and the name moves to the new bytes in one step, so that no reader finds it gone.
"""

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from artifacts.bundle_manifest import is_digest
from artifacts.disk_errors import reading, writing
from artifacts.errors import StoreError
from artifacts.files import make_folder, publish_new, staged, sync_folder

_CHUNK = 1 << 20


class ObjectFolder:
    """The objects of a store; safe for any number of processes and threads."""

    def __init__(self, root: Path, *, sync: bool) -> None:
        """`root` is the store's folder; with `sync`, objects survive a power loss once they are put."""
        self._root = root
        self._sync = sync

    def path(self, digest: str) -> Path:
        """Where the object is, or would be."""
        return self._root / "objects" / "sha256" / digest[:2] / digest

    def put(self, chunks: Iterable[bytes | memoryview], size: int) -> str:
        """Store the bytes and return their digest; `size` is how many to expect. Raises StoreError."""
        hasher = hashlib.sha256()
        with (
            writing(self._root),
            staged(self._root, _hashed(chunks, hasher), sync=self._sync, size=size) as temporary,
        ):
            digest = hasher.hexdigest()
            self._publish(temporary, digest)
        return digest

    def _publish(self, temporary: Path, digest: str) -> None:
        try:
            publish_new(temporary, self.path(digest), sync=self._sync)
        except FileExistsError:
            if not self._is_intact(digest):
                self._replace_damaged(temporary, digest)

    def _replace_damaged(self, temporary: Path, digest: str) -> None:
        path, quarantine = self.path(digest), self._root / "quarantine"
        make_folder(quarantine, sync=self._sync)
        os.link(path, quarantine / f"{digest}.{secrets.token_hex(4)}")
        os.replace(temporary, path)
        if self._sync:
            sync_folder(path.parent)

    def check(self, digest: str) -> None:
        """Raise StoreError, code "missing" or "damaged", unless the object exists and hashes to its name."""
        with reading(self._root), self._present(digest):
            intact = self._is_intact(digest)
        if not intact:
            raise self._unusable("damaged", digest)

    def read(self, digest: str) -> bytes:
        """The object's bytes, checked as `check` does."""
        with reading(self._root), self._present(digest):
            data = self.path(digest).read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._unusable("damaged", digest)
        return data

    def size(self, digest: str) -> int:
        """The object's size in bytes; StoreError, code "missing", if it is absent."""
        with reading(self._root), self._present(digest):
            return self.path(digest).stat().st_size

    @contextmanager
    def _present(self, digest: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise self._unusable("missing", digest) from error

    def _unusable(self, code: str, digest: str) -> StoreError:
        return StoreError(code, f"object {digest} in {self._root} is {code}: run the step that made it again")

    def _is_intact(self, digest: str) -> bool:
        with self.path(digest).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == digest

    def digests(self, prefix: str = "") -> Iterator[str]:
        """Digests of the objects whose digest begins with `prefix`, a text of hex digits."""
        for path in self._root.glob(f"objects/sha256/{prefix[:2]}*/{prefix}*"):
            if is_digest(path.name):
                yield path.name


def read_chunks(stream: BinaryIO) -> Iterator[bytes]:
    """The rest of a stream, a mebibyte at a time."""
    while chunk := stream.read(_CHUNK):
        yield chunk


def _hashed(chunks: Iterable[bytes | memoryview], hasher: "hashlib._Hash") -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        hasher.update(chunk)
        yield chunk
