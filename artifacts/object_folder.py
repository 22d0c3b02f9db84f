"""Content-addressed files: `objects/sha256/ab/<64 hex>`, each named by the SHA-256 of its bytes.

An object appears complete or not at all, is read-only and never changes. Publishing: write and hash a
temporary file, sync it, link it to its name, sync the folder, drop the temporary name. A name that exists
already holds the same bytes, written by somebody else, unless the disk has damaged it: then the damaged file
is kept in quarantine and the name moves to the new bytes in one step, so that no reader finds it gone.

`quarantine/<date>/` holds what was damaged and what no reference reached on that day, until it is purged; a
reader who comes late still finds a collected object there, and a new reference brings it back.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import BinaryIO, TypeVar

from artifacts.bundle_manifest import is_digest
from artifacts.disk_errors import reading, writing
from artifacts.errors import StoreError
from artifacts.files import CANNOT_LINK, make_folder, publish_new, staged, sync_folder

_CHUNK = 1 << 20

Result = TypeVar("Result")


class ObjectFolder:
    """The objects of a store; safe for any number of processes and threads."""

    def __init__(self, root: Path, *, sync: bool) -> None:
        """`root` is the store's folder; with `sync`, objects survive a power loss once they are put."""
        self._root = root
        self._sync = sync

    def path(self, digest: str) -> Path:
        """Where the object is, or would be."""
        return self._root / object_name(digest)

    def put(
        self,
        chunks: Iterable[bytes | memoryview],
        size: int,
        *,
        expected: str | None = None,
        publishing: AbstractContextManager[None] | None = None,
    ) -> str:
        """Store the bytes and return their digest; `size` is how many to reserve room for.

        publishing: a lock to hold while the object gets its name, and not while the bytes come in.
        Raises StoreError, code "damaged" if they do not hash to the `expected` digest: then nothing is kept.
        """
        hasher = hashlib.sha256()
        with (
            writing(self._root),
            staged(self._root, _hashed(chunks, hasher), sync=self._sync, size=size) as temporary,
        ):
            digest = hasher.hexdigest()
            if expected not in (None, digest):
                raise StoreError("damaged", f"bytes that should be object {expected} have SHA-256 {digest}")
            with publishing or nullcontext():
                self._publish(temporary, digest)
        return digest

    def has(self, digest: str) -> bool:
        """Whether the object is among the objects, intact or not."""
        with reading(self._root):
            return self.path(digest).exists()

    def keep(self, digest: str) -> int:
        """The size of an object that a reference is about to name, brought back from quarantine if need be.

        Raises StoreError, code "missing", if it is in neither place.
        """
        with writing(self._root), self._present(digest):
            if not self.path(digest).exists():
                with suppress(FileExistsError):  # somebody else brought it back
                    publish_new(self._found(digest), self.path(digest), sync=self._sync)
            if self._sync:  # its writer may have been killed between giving the name and syncing the folder
                sync_folder(self.path(digest).parent)
            return self.path(digest).stat().st_size

    def retire(self, digest: str) -> None:
        """Move an object into today's quarantine. For a collector, who holds the store alone."""
        with writing(self._root):
            os.replace(self.path(digest), self._quarantine() / digest)
            self.path(digest).unlink(missing_ok=True)  # two names of one file: `replace` leaves both

    def quarantined(self, before: date) -> list[Path]:
        """Folders of the quarantine that are of days before a date; what is called otherwise is not ours."""
        return sorted(
            folder
            for folder in self._quarantined("????-??-??")
            if _is_day(folder.name) and folder.name < before.isoformat() and _is_folder(folder)
        )

    def purge(self, before: date) -> list[Path]:
        """Delete the folders that `quarantined` lists, and say which they were."""
        with writing(self._root):
            folders = self.quarantined(before)
            for folder in folders:
                shutil.rmtree(folder)
        return folders

    def _publish(self, temporary: Path, digest: str) -> None:
        try:
            publish_new(temporary, self.path(digest), sync=self._sync)
        except FileExistsError:
            if not self._hashes_to(digest):
                self._replace_damaged(temporary, digest)

    def _replace_damaged(self, temporary: Path, digest: str) -> None:
        path = self.path(digest)
        try:
            os.link(path, self._quarantine() / f"{digest}.damaged-{secrets.token_hex(4)}")
        except OSError as error:  # without hard links the damaged bytes are not kept
            if error.errno not in CANNOT_LINK:
                raise
        os.replace(temporary, path)
        if self._sync:
            sync_folder(path.parent)

    def check(self, digest: str) -> None:
        """Raise StoreError, code "missing" or "damaged", unless the object exists and hashes to its name."""
        if not self._hashes_to(digest):
            raise self._unusable("damaged", digest)

    def is_intact(self, digest: str) -> bool:
        """Whether the object exists, be it in quarantine, and hashes to its name."""
        try:
            return self._hashes_to(digest)
        except StoreError as error:
            if error.code != "missing":
                raise
            return False

    def read(self, digest: str) -> bytes:
        """The object's bytes, checked as `check` does."""
        data = self.use(digest, Path.read_bytes)
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._unusable("damaged", digest)
        return data

    def size(self, digest: str) -> int:
        """The object's size in bytes; StoreError, code "missing", if it is absent."""
        return self.use(digest, lambda path: path.stat().st_size)

    def locate(self, digest: str) -> Path:
        """The object's file, among the objects or in quarantine; StoreError, code "missing", without one."""

        def existing(path: Path) -> Path:
            path.stat()
            return path

        return self.use(digest, existing)

    def use(self, digest: str, read: Callable[[Path], Result]) -> Result:
        """What `read` makes of the object's file; if that is collected meanwhile, of its file in quarantine.

        Raises StoreError, code "missing", if it is in neither place.
        """
        with reading(self._root), self._present(digest):
            try:
                return read(self.path(digest))
            except FileNotFoundError:
                return read(self._found(digest))

    @contextmanager
    def _present(self, digest: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise self._unusable("missing", digest) from error

    def _found(self, digest: str) -> Path:
        path = self.path(digest)
        if path.exists():
            return path
        return next(self._quarantined(f"*/{digest}"), path)

    def in_quarantine(self, prefix: str = "") -> list[str]:
        """Digests of the objects in quarantine whose digest begins with `prefix`, a text of hex digits."""
        with reading(self._root):
            return sorted({path.name for path in self._quarantined(f"*/{prefix}*") if is_digest(path.name)})

    def _quarantine(self) -> Path:
        folder = self._root / "quarantine" / datetime.now(UTC).date().isoformat()
        make_folder(folder, sync=self._sync)
        return folder

    def _quarantined(self, pattern: str) -> Iterator[Path]:
        return self._root.glob(f"quarantine/{pattern}")

    def _unusable(self, code: str, digest: str) -> StoreError:
        return StoreError(code, f"object {digest} in {self._root} is {code}: run the step that made it again")

    def _hashes_to(self, digest: str) -> bool:
        def hashed(path: Path) -> str:
            with path.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()

        return self.use(digest, hashed) == digest

    def digests(self, prefix: str = "") -> Iterator[str]:
        """Digests of the objects whose digest begins with `prefix`, a text of hex digits."""
        with reading(self._root):
            shards = filter(os.DirEntry.is_dir, _entries(self._root / "objects/sha256", prefix[:2]))
            found = [entry for shard in shards for entry in _entries(shard.path, prefix)]
            return iter([entry.name for entry in found if self._is_object(entry)])

    def _is_object(self, entry: os.DirEntry[str]) -> bool:
        named = is_digest(entry.name) and Path(entry.path) == self.path(entry.name)
        return named and entry.is_file(follow_symlinks=False)


def _entries(folder: Path | str, prefix: str) -> list[os.DirEntry[str]]:
    """What begins with `prefix` in a folder; one that is not there has nothing, one that hides it raises."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return [entry for entry in entries if entry.name.startswith(prefix)]
    return []


def object_name(digest: str) -> str:
    """Where an object lies within a store."""
    return f"objects/sha256/{digest[:2]}/{digest}"


def read_chunks(stream: BinaryIO) -> Iterator[bytes]:
    """The rest of a stream, a mebibyte at a time."""
    while chunk := stream.read(_CHUNK):
        yield chunk


def _is_day(name: str) -> bool:
    try:
        return date.fromisoformat(name).isoformat() == name
    except ValueError:
        return False


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _hashed(chunks: Iterable[bytes | memoryview], hasher: "hashlib._Hash") -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        hasher.update(chunk)
        yield chunk
