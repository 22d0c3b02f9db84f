"""A store, or what some names reach, as one file: an uncompressed tar of the store's own layout.

The same content gives the same bytes: members in one order (marker, objects by digest, references as they can
be written), no times, no owners. Any tar can unpack one. The reader here demands exactly the bytes the writer
would have written and never makes a path out of what it reads, so a crafted file can do no more than be
refused.
"""

import hashlib
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from artifacts.bucket import LARGEST_VALUE
from artifacts.errors import ArtifactError, StoreError
from artifacts.files import write_atomic
from artifacts.object_folder import object_name, read_chunks
from artifacts.records import reference_order, require_reference_name
from artifacts.selection import all_objects, is_readable
from artifacts.store import Progress, Store
from artifacts.store_marker import MARKER, MARKER_NAME, require_marker
from artifacts.transfer import Tally, Transferred, adopt, is_intact

_BLOCK = 512
_CHUNK = 1 << 20
_END = bytes(2 * _BLOCK)
_OBJECT = re.compile(r"objects/sha256/([0-9a-f]{2})/(\1[0-9a-f]{62})")

Member = tuple[str, int]
"""Name and size in bytes."""


def export(
    store: Store, path: Path | str, names: Sequence[str] = (), progress: Progress | None = None
) -> Transferred:
    """Write what names of runs, stages, tags or artifacts reach to a file; without names, everything.

    Raises StoreError: "unknown", "ambiguous", "damaged-reference", "missing" or "damaged" for an object that
    is not as it should be; OSError for the file. One that exists is replaced at the end, or left as it was.
    """
    references = store.selected(names)
    digests = sorted(all_objects(references))
    tally = Tally(sum(_size(store, digest) for digest in digests), progress)
    write_atomic(path, _members(store, digests, references, tally), sync=True)
    return tally.done


def _members(store: Store, digests: list[str], references: dict[str, bytes], tally: Tally) -> Iterator[bytes]:
    yield from _member(MARKER_NAME, MARKER)
    for digest in digests:
        path = store.path(store.ref("object", digest))
        with path.open("rb") as stream:
            size = path.stat().st_size
            yield _header(object_name(digest), size)
            yield from _checked(stream, digest, size)
            yield _padding(size)
        tally.object(size, digest)
        tally.saw(size, digest)
    for name in sorted(references, key=reference_order):
        yield from _member(f"refs/{name}", references[name])
        tally.reference(name, written=True)
    yield _END


def _member(name: str, data: bytes) -> Iterator[bytes]:
    yield _header(name, len(data)) + data + _padding(len(data))


def _header(name: str, size: int) -> bytes:
    """One to three blocks; GNU's form, which has room for every name and size."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o444
    return info.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


def import_(
    store: Store,
    path: Path | str,
    progress: Progress | None = None,
    *,
    force: bool = False,
    dry_run: bool = False,
) -> Transferred:
    """Bring everything in an archive into a store, by the rules of `pull`; objects damaged here are repaired.

    With `dry_run` the whole archive is read and checked, and nothing written.
    Raises ArtifactError, code "archive", for a file that `export` did not write or that has changed since:
    then no reference is written. Raises StoreError: "missing" for objects that neither has, "tag-diverged";
    OSError.
    """
    with Path(path).open("rb") as stream:
        if not Path(path).is_file():  # a pipe has no size, by which to see what is too large
            raise ArtifactError("archive", f"cannot import {path}, which is no file: save it to one first")
        reader = _Reader(stream, str(path), dry_run=dry_run)
        tally = Tally(os.fstat(stream.fileno()).st_size, progress)
        references = reader.contents(store, tally)
    adopt(store, references, tally, force=force, dry_run=dry_run)
    return tally.done


class _Reader:
    """Reads one archive from start to end."""

    def __init__(self, stream: BinaryIO, path: str, *, dry_run: bool) -> None:
        self._stream, self._path, self._dry_run = stream, path, dry_run

    def contents(self, store: Store, tally: Tally) -> dict[str, bytes]:
        """Bring all objects into the store; returns the references. Raises ArtifactError, code "archive"."""
        self._read_marker()
        references: dict[str, bytes] = {}
        last = ""
        while member := self._next_member():
            name, size = member
            found = _OBJECT.fullmatch(name)
            if found and not references and name > last:
                self._read_object(store, found[2], size, tally)
            else:
                self._require_order(name, references)
                references[name.removeprefix("refs/")] = self._read_small(name, size)
            last = name
        if self._stream.read(1):
            raise self._bad("there are bytes after its end")
        return references

    def _read_marker(self) -> None:
        member = self._next_member()
        if member is None or member[0] != MARKER_NAME:
            raise self._bad(f"it does not begin with {MARKER_NAME}")
        try:
            require_marker(self._read_small(*member), self._path)
        except StoreError as error:
            raise self._bad(str(error)) from error

    def _next_member(self) -> Member | None:
        """The next member's name and size; None at the end."""
        raw = self._take(_BLOCK)
        if raw == _END[:_BLOCK]:
            if self._take(_BLOCK) != raw:
                raise self._bad("its end is not an end")
            return None
        if raw[156:157] == tarfile.GNUTYPE_LONGNAME:
            raw += self._take(2 * _BLOCK)
            field = raw[_BLOCK : 2 * _BLOCK]
        else:
            field = raw[:100]
        try:
            name = field.rstrip(b"\0").decode("ascii")
            size = tarfile.nti(raw[-_BLOCK:][124:136])  # type: ignore[attr-defined]
            sound = size >= 0 and raw == _header(name, size)
        except (ValueError, tarfile.TarError) as error:
            raise self._bad(f"a header cannot be read: {error}") from error
        if not sound:
            raise self._bad(f"the header of {name!r} is not as it would have been written")
        return name, size

    def _read_object(self, store: Store, digest: str, size: int, tally: Tally) -> None:
        if size > os.fstat(self._stream.fileno()).st_size:
            raise self._bad(f"object {digest} is larger than the file")
        chunks = self._hashed(digest, size)
        if is_intact(store, digest):
            for _ in chunks:  # it has to be what it says all the same
                pass
            tally.skip(size, digest)
        else:
            if self._dry_run:
                for _ in chunks:
                    pass
            else:
                store.adopt_object(digest, chunks, size)
            tally.object(size, digest)
            tally.saw(size, digest)

    def _hashed(self, digest: str, size: int) -> Iterator[bytes]:
        hasher = hashlib.sha256()
        for start in range(0, size, _CHUNK):
            chunk = self._take(min(_CHUNK, size - start))
            hasher.update(chunk)
            yield chunk
        self._take_padding(size)
        if hasher.hexdigest() != digest:
            raise self._bad(f"object {digest} is damaged")

    def _require_order(self, name: str, references: dict[str, bytes]) -> None:
        reference = name.removeprefix("refs/")
        try:
            if reference == name:
                raise self._bad(f"{name!r} is nothing that a store holds, or is out of order")
            require_reference_name(reference)
        except StoreError as error:
            raise self._bad(str(error)) from error
        if references and reference_order(next(reversed(references))) >= reference_order(reference):
            raise self._bad(f"{name!r} is out of order")

    def _read_small(self, name: str, size: int) -> bytes:
        if size > LARGEST_VALUE:
            raise self._bad(f"{name!r} has {size} bytes, too many for what it should be")
        data = self._take(size)
        self._take_padding(size)
        if name.startswith("refs/") and not is_readable(name.removeprefix("refs/"), data):
            raise self._bad(f"{name!r} is damaged")
        return data

    def _take_padding(self, size: int) -> None:
        padding = _padding(size)
        if self._take(len(padding)) != padding:
            raise self._bad("there is something between its members")

    def _take(self, count: int) -> bytes:
        data = self._stream.read(count)
        if len(data) < count:
            raise self._bad("it ends too early")
        return data

    def _bad(self, reason: str) -> ArtifactError:
        message = f"{self._path} is not an intact archive of a store: {reason}"
        return ArtifactError("archive", f"{message}; export it again")


def _size(store: Store, digest: str) -> int:
    return store.path(store.ref("object", digest)).stat().st_size


def _checked(stream: BinaryIO, digest: str, size: int) -> Iterator[bytes]:
    hasher, count = hashlib.sha256(), 0
    for chunk in read_chunks(stream):
        hasher.update(chunk)
        count += len(chunk)
        yield chunk
    if hasher.hexdigest() != digest or count != size:
        raise StoreError("damaged", f"object {digest} is damaged: run the step that made it again")
