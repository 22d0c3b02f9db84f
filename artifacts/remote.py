"""A store in a bucket: the layout of a local one, written by any number of machines without a lock.

Objects are named by their SHA-256, so writing one twice does no harm. References need two kinds of writes
that the server must decide: create-only, so that of two records of a step the first stands, and
replace-if-unchanged, so that a tag moves on from what its mover has seen. Whether the server does both is
tried out at opening.

A write whose answer is lost is sent again and then finds itself: "it exists" is followed by a look at it, and
equal bytes are success.
"""

import hashlib
import secrets
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Self

from artifacts.bucket import Bucket, KeyChanged, NoSuchKey, Sent, open_bucket
from artifacts.disk_errors import reading
from artifacts.errors import StoreError
from artifacts.object_folder import object_name
from artifacts.records import is_reference_name, reference_order, require_reference_name
from artifacts.retry import Patience
from artifacts.store_marker import MARKER, MARKER_NAME, OWN_ENTRIES, require_marker

_PATIENCE = Patience()


def _ignore(count: int) -> None:
    pass


class RemoteStore:
    """A store at a URL, opened by `RemoteStore.open`. All methods raise StoreError.

    Codes: "remote-unreachable" when trying again did not help, "remote-denied", "no-bucket", "remote" for
    other refusals; for `file://` those of a local store.
    """

    def __init__(self, url: str, bucket: Bucket, patience: Patience) -> None:
        """For `open`."""
        self.url = url
        self._bucket = bucket
        self._patience = patience
        self._writable = False

    @classmethod
    def open(cls, url: str, *, writable: bool = False, patience: Patience = _PATIENCE) -> Self:
        """Open the store at `s3://`, `gs://`, `file://` or `memory://`.

        Reading needs the permission to get and list, no more. With `writable` an empty place becomes a store,
        and the server must show that it refuses to overwrite when told so. Raises StoreError, besides what
        the class says: "bad-url", "missing-package", "not-a-store", "newer-store", "no-conditional-writes".
        """
        remote, is_new = cls._found(url, patience)
        if is_new and not writable:
            raise StoreError("not-a-store", f"there is no store at {remote.url}: push one there first")
        if writable:
            remote._prepare(is_new=is_new)
        return remote

    @classmethod
    def preview(cls, url: str, *, patience: Patience = _PATIENCE) -> Self:
        """The store that `open` with `writable` would open or make, for looking only; absent, it is empty.

        Raises StoreError as `open` does.
        """
        remote, is_new = cls._found(url, patience)
        if is_new:
            remote._require_empty()
        return remote

    @classmethod
    def _found(cls, url: str, patience: Patience) -> tuple[Self, bool]:
        """What is at a URL, and whether that is no store yet."""
        url = url.rstrip("/")
        remote = cls(url, open_bucket(url, patience), patience)
        marker = remote._read(MARKER_NAME)
        if marker is not None:
            require_marker(marker, url)
        return remote, marker is None

    def _require_empty(self) -> None:
        entries = (key.partition("/")[0] for key, _ in self._bucket.sizes(""))
        stray = next((entry for entry in entries if entry not in OWN_ENTRIES), None)
        if stray is not None:
            message = f"{self.url} is not a store and not empty (it holds {stray!r})"
            raise StoreError("not-a-store", f"{message}: give another folder of the bucket")

    def _prepare(self, *, is_new: bool) -> None:
        if is_new:
            self._require_empty()
        self._writable = True
        with self.writers_lock():
            self._probe()
            if is_new and not self._create(MARKER_NAME, MARKER):
                require_marker(self._read(MARKER_NAME) or b"", self.url)  # another machine was first

    def _probe(self) -> None:
        """Raise StoreError, code "no-conditional-writes", unless conditions of writes are kept."""
        key = f"tmp/probe-{secrets.token_hex(8)}"
        try:
            kept = self._create(key, b"1") and not self._create(key, b"2")
            stale = self._bucket.read(key)
            kept = kept and stale is not None and self._swap(key, b"3", stale[1])
            kept = kept and stale is not None and not self._swap(key, b"4", stale[1])
        except StoreError as error:
            if error.code != "remote-unsupported":
                raise
            kept = False
        self._bucket.remove(key)
        if not kept:
            message = f"{self.url} does not keep to conditional writes, so writers would overwrite each other"
            raise StoreError(
                "no-conditional-writes", f"{message}: use a service that has If-None-Match and If-Match"
            )

    # Objects

    def object_sizes(self) -> dict[str, int]:
        """Sizes in bytes of all objects that are here, by digest; their bytes are not looked at."""
        found = ((key, key.rpartition("/")[2], size) for key, size in self._bucket.sizes("objects/"))
        return {digest: size for key, digest, size in found if key == object_name(digest)}

    def keep_objects(self, digests: Collection[str]) -> list[str]:
        """Let objects survive a power loss, whoever put them; returns those that are not here any more.

        To be called, as `keep_references`, while `writers_lock` is held.
        """
        self._require_writable()
        lost = set(self._bucket.keep([object_name(digest) for digest in digests]))
        return [digest for digest in digests if object_name(digest) in lost]

    def put_object(self, digest: str, path: Path, sent: Sent = _ignore) -> None:
        """Write or replace an object with a file's bytes; `sent` hears how many have arrived since last time.

        Raises StoreError, code "damaged", if the file does not hash to the digest: then nothing is written.
        """
        self._require_writable()
        with reading(path):
            self._bucket.upload(object_name(digest), path, digest, sent)

    def get_object(self, digest: str, size: int) -> Iterator[bytes]:
        """The bytes of an object, which go on where they were when a connection breaks.

        Raises StoreError at their end, so whoever takes them must wait for it: "damaged" unless they are
        `size` bytes that hash to the digest, "missing" if it is not here.
        """
        key = object_name(digest)
        hasher, count = hashlib.sha256(), 0
        try:
            for chunk in self._patience.resume(lambda start: self._bucket.stream(key, start), size):
                hasher.update(chunk)
                count += len(chunk)
                if count > size:
                    break
                yield chunk
        except NoSuchKey as error:
            raise self.unusable("missing", digest) from error
        if count != size or hasher.hexdigest() != digest:
            raise self.unusable("damaged", digest)

    def unusable(self, code: Literal["missing", "damaged"], digest: str) -> StoreError:
        """What to raise for an object that is not here, or not of its size or hash."""
        first = f"remove {object_name(digest)} there and " if code == "damaged" else ""
        message = f"object {digest} at {self.url} is {code}"
        return StoreError(code, f"{message}: {first}push again from a store that has it")

    # References

    def reference_names(self) -> list[str]:
        """Names of all references, such as `runs/demo/pretrain`: artifacts, then steps, runs and tags."""
        names = [key.removeprefix("refs/") for key, _ in self._bucket.sizes("refs/")]
        return sorted(filter(is_reference_name, names), key=reference_order)

    def read_reference(self, name: str) -> bytes | None:
        """The bytes of a reference, or None."""
        return self._read(_reference_key(name))

    def create_reference(self, name: str, data: bytes) -> bool:
        """Write a reference unless it exists; whether the name has these bytes now."""
        self._require_writable()
        return self._create(_reference_key(name), data)

    def replace_reference(self, name: str, data: bytes) -> None:
        """Write or replace a reference."""
        self._require_writable()
        self._bucket.write(_reference_key(name), data)

    def swap_reference(self, name: str, data: bytes, expected: bytes | None) -> bool:
        """Write a reference if it is as expected, None for absent; whether the name has these bytes now."""
        self._require_writable()
        key = _reference_key(name)
        if expected is None:
            return self._create(key, data)
        found = self._bucket.read(key)
        if found is None or found[0] != expected:
            return found is not None and found[0] == data
        return self._swap(key, data, found[1])

    def keep_references(self, names: Collection[str]) -> None:
        """Let references, and that this is a store, survive a power loss, whoever wrote them."""
        self._require_writable()
        self._bucket.keep([MARKER_NAME, *map(_reference_key, names)])

    def writers_lock(self) -> AbstractContextManager[None]:
        """Held while objects or references are written, so that no collector comes between.

        Not for as long as many objects take: a collector that waits for it lets no other writer begin.
        """
        return self._bucket.writers_lock()

    def _create(self, key: str, data: bytes) -> bool:
        try:
            self._bucket.create(key, data)
        except KeyChanged:
            return self._read(key) == data
        return True

    def _swap(self, key: str, data: bytes, version: Any) -> bool:
        try:
            self._bucket.swap(key, data, version)
        except KeyChanged:
            return self._read(key) == data
        return True

    def _read(self, key: str) -> bytes | None:
        found = self._bucket.read(key)
        return None if found is None else found[0]

    def _require_writable(self) -> None:
        if not self._writable:
            raise StoreError("not-writable", f"{self.url} was opened for reading: open it with writable=True")


def _reference_key(name: str) -> str:
    require_reference_name(name)
    return f"refs/{name}"
