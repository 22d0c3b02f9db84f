"""The bytes around the members of a canonical ZIP file: what CPython's `zipfile` writes, nothing chosen.

Members are stored, dated 1980-01-01, mode 0600, without comments or extra fields; ZIP64 fields appear where
CPython adds them (members near 2 GiB and beyond). Because nothing is left to choice, a reader can compute a
file's size and headers from its members alone, and demand them. Each header is a list of labelled fields, so
that a reader can also say which one differs. Field order and meaning: PKWARE APPNOTE 6.3.10, section 4.3.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Fields = list[tuple[str, bytes]]
"""Labelled pieces of a header, in file order."""

LOCAL_SIGNATURE = b"PK\x03\x04"
MANIFEST_NAME = "manifest.json"
MAXIMUM_MANIFEST_BYTES = 1_048_576

_ZIP64_LIMIT = 2**31 - 1
_UNUSED_32 = 2**32 - 1
_DATE_1980 = 0x0021
_MODE_0600 = 0o600 << 16


@dataclass(frozen=True, slots=True)
class Member:
    """One stored file of the archive: its ASCII name, size in bytes and CRC-32."""

    name: str
    size: int
    crc: int

    @property
    def _local_zip64(self) -> bool:  # CPython leaves 5 % of room for compression, even when it stores
        return self.size * 1.05 > _ZIP64_LIMIT

    def local_header(self) -> Fields:
        """The header in front of the member's bytes."""
        sizes = _u32(_UNUSED_32) * 2 if self._local_zip64 else _u32(self.size) * 2
        extra = _zip64_extra([self.size, self.size]) if self._local_zip64 else b""
        return self._labelled(
            [
                ("local header signature", LOCAL_SIGNATURE),
                ("version needed", _u16(45 if self._local_zip64 else 20)),
                *self._common_fields(sizes, extra),
                ("name", self.name.encode("ascii")),
                ("extra field", extra),
            ]
        )

    def directory_entry(self, offset: int) -> Fields:
        """The member's record in the central directory; `offset` is where its local header begins."""
        large, far = self.size > _ZIP64_LIMIT, offset > _ZIP64_LIMIT
        extra = _zip64_extra([self.size] * 2 * large + [offset] * far)
        version = _u16(45 if self._local_zip64 or extra else 20)
        return self._labelled(
            [
                ("directory entry signature", b"PK\x01\x02"),
                ("version made by", version),
                ("version needed", version),
                *self._common_fields(_u32(_UNUSED_32 if large else self.size) * 2, extra),
                ("comment length", _u16(0)),
                ("disk number", _u16(0)),
                ("internal attributes", _u16(0)),
                ("external attributes", _u32(_MODE_0600)),
                ("local header offset", _u32(_UNUSED_32 if far else offset)),
                ("name", self.name.encode("ascii")),
                ("extra field", extra),
            ]
        )

    def _common_fields(self, sizes: bytes, extra: bytes) -> Fields:
        return [
            ("flags", _u16(0)),
            ("compression method", _u16(0)),
            ("time", _u16(0)),
            ("date", _u16(_DATE_1980)),
            ("CRC-32", _u32(self.crc)),
            ("sizes", sizes),
            ("name length", _u16(len(self.name))),
            ("extra field length", _u16(len(extra))),
        ]

    def _labelled(self, fields: Fields) -> Fields:
        return [(f"{label} of {self.name}", value) for label, value in fields]


def archive(contents: Sequence[tuple[str, bytes | memoryview]]) -> Iterator[bytes | memoryview]:
    """The file that holds these named contents, flat bytes, in pieces that share their memory."""
    members = [Member(name, len(content), zlib.crc32(content)) for name, content in contents]
    for member, (_, content) in zip(members, contents, strict=True):
        yield join(member.local_header())
        yield content
    yield join(directory(members))


def directory(members: Sequence[Member]) -> Fields:
    """The central directory and the end records behind the last of the members."""
    fields: Fields = []
    offset = 0
    for member in members:
        fields += member.directory_entry(offset)
        offset += len(join(member.local_header())) + member.size
    return fields + _end_records(len(members), len(join(fields)), offset)


def _end_records(count: int, size: int, offset: int) -> Fields:
    fields: Fields = []
    if offset > _ZIP64_LIMIT:
        record = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
        locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + size, 1)
        fields = [("ZIP64 end record", record), ("ZIP64 end locator", locator)]
    return [
        *fields,
        ("end record signature", b"PK\x05\x06"),
        ("disk numbers", _u16(0) * 2),
        ("entry counts", _u16(count) * 2),
        ("directory size", _u32(size)),
        ("directory offset", _u32(min(offset, _UNUSED_32))),
        ("archive comment length", _u16(0)),
    ]


def join(fields: Fields) -> bytes:
    """The bytes of the labelled fields."""
    return b"".join(value for _, value in fields)


def first_difference(actual: bytes, expected: Fields) -> str | None:
    """The label of the first field in which `actual` is not as expected; None if every byte agrees."""
    offset = 0
    for label, value in expected:
        if actual[offset : offset + len(value)] != value:
            return label
        offset += len(value)
    return None if offset == len(actual) else "length"


def _zip64_extra(values: list[int]) -> bytes:
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _u16(value: int) -> bytes:
    return value.to_bytes(2, "little")


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")
