"""Reading a canonical archive: a manifest, and the members it describes, believed once every byte is checked.

The order keeps a forged file harmless: the manifest (1 MiB at most) says how long the file must be, that is
compared with its real length, and only then are the members read, 4 MiB at a time, to be hashed. What
lies between them must be what the writer would write. Nothing is allocated for the members themselves: their
arrays are views of the file, mapped read-only, or of the bytes that were given.
"""

import hashlib
import io
import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from artifacts.arrays import FLOAT32
from artifacts.errors import ArtifactError
from artifacts.zip_layout import (
    LOCAL_SIGNATURE,
    MANIFEST_NAME,
    MAXIMUM_MANIFEST_BYTES,
    Fields,
    Member,
    directory,
    first_difference,
    join,
)

_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True)
class Described:
    """What a manifest says about a member; `is_float` members are float32 and must be finite."""

    name: str
    size: int
    sha256: str
    is_float: bool


class ArchiveReader:
    """One archive, read from front to back: `manifest` once, then `members` once."""

    def __init__(self, stream: io.BufferedIOBase, size: int) -> None:
        """`stream` stands at the start of a file of `size` bytes, or of a BytesIO."""
        self._stream = stream
        self._size = size

    @classmethod
    def of_bytes(cls, data: bytes) -> Self:
        """A reader of an archive in memory."""
        return cls(io.BytesIO(data), len(data))

    def manifest(self) -> bytes:
        """The bytes of `manifest.json`, the first member. Raises ArtifactError."""
        header = self._read_exactly(len(join(Member(MANIFEST_NAME, 0, 0).local_header())))
        if not header.startswith(LOCAL_SIGNATURE):
            raise ArtifactError(
                "not-zip", "does not begin with a ZIP header: another kind of file, or something in front"
            )
        declared = int.from_bytes(header[18:22], "little")  # compressed size, the real one where it is stored
        if declared > MAXIMUM_MANIFEST_BYTES:
            raise ArtifactError("manifest-size", f"declares a manifest of {declared} bytes, more than 1 MiB")
        manifest = self._read_exactly(declared)
        _require_fields(header, Member(MANIFEST_NAME, declared, zlib.crc32(manifest)).local_header())
        return manifest

    def members(self, manifest: bytes, described: Sequence[Described]) -> list[NDArray[np.uint8]]:
        """The bytes of each member behind the manifest: read-only uint8 `[size]`, checked.

        Raises ArtifactError unless the rest of the file is exactly these members and their directory.
        """
        self._require_size(manifest, described)
        members = [Member(MANIFEST_NAME, len(manifest), zlib.crc32(manifest))]
        offsets = []
        for description in described:
            header = self._read_exactly(len(join(_unhashed(description).local_header())))
            offsets.append(self._stream.tell())
            members.append(Member(description.name, description.size, self._read_member(description)))
            _require_fields(header, members[-1].local_header())
        expected = directory(members)
        _require_fields(self._stream.read(len(join(expected)) + 1), expected)
        memory = self._memory()
        return [
            np.frombuffer(memory, np.uint8, description.size, offset)
            for description, offset in zip(described, offsets, strict=True)
        ]

    def _require_size(self, manifest: bytes, described: Sequence[Described]) -> None:
        if sum(description.size for description in described) > self._size:  # any number, however absurd
            raise ArtifactError("truncated", f"has {self._size} bytes, fewer than its manifest asks for")
        members = [Member(MANIFEST_NAME, len(manifest), 0), *map(_unhashed, described)]
        expected = len(join(directory(members)))
        expected += sum(len(join(member.local_header())) + member.size for member in members)
        if self._size < expected:
            raise ArtifactError("truncated", f"has {self._size} bytes where its manifest asks for {expected}")
        if self._size > expected:
            raise ArtifactError(
                "trailing-bytes",
                f"has {self._size} bytes where its manifest asks for {expected}: "
                "a comment, an entry or bytes too many",
            )

    def _read_member(self, described: Described) -> int:
        """The CRC-32 of the next member, whose hash and values are checked while it passes."""
        buffer = memoryview(bytearray(min(_CHUNK, described.size)))
        hasher, crc, finite = hashlib.sha256(), 0, True
        with ThreadPoolExecutor(1) as beside:  # hashing takes as long as all else
            for start in range(0, described.size, _CHUNK):
                chunk = buffer[: described.size - start]
                if self._stream.readinto(chunk) != len(chunk):
                    raise ArtifactError("truncated", f"ends inside {described.name}")
                hashed = beside.submit(hasher.update, chunk) if len(chunk) == _CHUNK else None
                crc = zlib.crc32(chunk, crc)
                finite = finite and (
                    not described.is_float or bool(np.isfinite(np.frombuffer(chunk, FLOAT32)).all())
                )
                if hashed:
                    hashed.result()
                else:
                    hasher.update(chunk)
        digest = hasher.hexdigest()
        if digest != described.sha256:
            raise ArtifactError("checksum", f"{described.name} has SHA-256 {digest}, not {described.sha256}")
        if not finite:
            raise ArtifactError("not-finite", f"{described.name} holds NaN or an infinity")
        return crc

    def _read_exactly(self, count: int) -> bytes:
        data = self._stream.read(count)
        if len(data) < count:
            raise ArtifactError("truncated", "ends inside a header or the manifest")
        return data

    def _memory(self) -> Any:
        """The whole archive as read-only memory: the given bytes, or a mapping that outlives the name."""
        if isinstance(self._stream, io.BytesIO):
            return self._stream.getvalue()
        try:  # private, because some network file systems know no other mapping
            return mmap.mmap(self._stream.fileno(), self._size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        except ValueError as error:
            raise ArtifactError("truncated", "became shorter while it was read") from error


@contextmanager
def open_archive(path: Path | str, what: str) -> Iterator[ArchiveReader]:
    """A reader of the file `path`; FileNotFoundError, naming it a `what`, unless it is a regular file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no {what} at {path}: not a regular file")
    with path.open("rb") as stream:
        yield ArchiveReader(stream, os.fstat(stream.fileno()).st_size)


def _unhashed(described: Described) -> Member:
    return Member(described.name, described.size, 0)


def _require_fields(actual: bytes, expected: Fields) -> None:
    difference = first_difference(actual, expected)
    if difference:
        raise ArtifactError("container", f"is not a canonical ZIP file: {difference} differs")
