"""What a remote store needs of the place it lies in: keys, bytes, and writes that depend on what is there."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from artifacts.errors import StoreError
from artifacts.retry import Patience

CHUNK = 1 << 20
LARGEST_VALUE = 1 << 24
"""References are small; whatever is larger than this is none, and is not read into memory."""

Sent = Callable[[int], None]
"""Called with the number of bytes that have arrived since the last call."""


class NoSuchKey(Exception):
    """The bucket has nothing under the key."""


class KeyChanged(Exception):
    """The condition of a write was not met: the key exists, or its value is not the one expected."""


class Bucket(Protocol):
    """Keys such as `refs/tags/best` and their bytes. All methods raise StoreError for what they cannot do.

    Keys appear with all their bytes or not at all, whatever happens to the writer.
    """

    def read(self, key: str) -> tuple[bytes, Any] | None:
        """The bytes under a key and their version, for `swap`; None if there are none."""

    def stream(self, key: str, start: int) -> Iterator[bytes]:
        """The bytes under a key from an offset on. Raises NoSuchKey, and TemporaryError if they break off."""

    def create(self, key: str, data: bytes) -> None:
        """Write a key that must not exist; KeyChanged if it does, which may be our own write, asked twice."""

    def swap(self, key: str, data: bytes, version: Any) -> None:
        """Replace a key's bytes, if they are still of this version; KeyChanged otherwise, as for `create`."""

    def write(self, key: str, data: bytes) -> None:
        """Write or replace a key."""

    def upload(self, key: str, path: Path, digest: str, sent: Sent) -> None:
        """Write or replace a key with a file's bytes; StoreError, code "damaged", if they hash to another."""

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """All keys that begin with the prefix, in any order, each with its number of bytes."""

    def remove(self, key: str) -> None:
        """Remove a key, if it is there."""

    def keep(self, keys: Collection[str]) -> list[str]:
        """Let keys survive a power loss, whoever wrote them; returns those of them that are gone."""

    def writers_lock(self) -> AbstractContextManager[None]:
        """Held by a writer while it writes, where there is a lock to hold: no collector removes keys then."""


def open_bucket(url: str, patience: Patience) -> Bucket:
    """The place that a URL names.

    Raises StoreError: "bad-url", "missing-package" if what speaks this protocol is not installed.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or not rest.strip("/"):
        raise _bad_url(url)
    # Each is imported when it is needed: s3fs and gcsfs are optional and slow to import.
    if scheme == "s3":
        from artifacts.bucket_s3 import S3Bucket

        return S3Bucket(url, patience)
    if scheme == "gs":
        from artifacts.bucket_gs import GoogleBucket

        return GoogleBucket(url, patience)
    if scheme == "memory":
        from artifacts.bucket_memory import MemoryBucket

        return MemoryBucket(url)
    if scheme == "file" and rest.startswith("/"):
        from artifacts.bucket_folder import FolderBucket

        return FolderBucket(Path(rest))
    raise _bad_url(url)


def _bad_url(url: str) -> StoreError:
    forms = "s3://bucket/folder, gs://bucket/folder, file:///folder (three slashes) or memory://name"
    return StoreError("bad-url", f"{url!r} names no remote store: give {forms}")


def damaged_source(path: Path, digest: str) -> StoreError:
    """What `upload` raises for a file that does not hash to its digest."""
    return StoreError("damaged", f"object {digest} in {path} is damaged: run the step that made it again")


def missing_package(url: str, package: str, extra: str) -> StoreError:
    """What opening a bucket raises if the library for its protocol is not installed."""
    return StoreError("missing-package", f"{url} needs {package}: pip install 'riftco[{extra}]'")
