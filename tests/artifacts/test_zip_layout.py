"""The bytes around members equal what CPython's zipfile writes, below and beyond the ZIP64 limits."""

import sys
import zipfile
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts import zip_layout
from artifacts.zip_layout import Member, directory, first_difference, join
from tests.artifacts.bundles import zipped_entries

_LIMIT = 2**31 - 1


def framed(entries: list[tuple[str, bytes]]) -> bytes:
    members = [Member(name, len(data), zlib.crc32(data)) for name, data in entries]
    bodies = [join(member.local_header()) + data for member, (_, data) in zip(members, entries, strict=True)]
    return b"".join(bodies) + join(directory(members))


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4))
def test_an_archive_has_the_bytes_that_zipfile_writes(contents):
    entries = [(f"member-{index}.bin", data) for index, data in enumerate(contents)]
    assert framed(entries) == zipped_entries(entries)


# Before, zipfile gave such members the version of those without the field (cpython 103861).
as_today = pytest.mark.skipif(sys.version_info < (3, 11, 4), reason="zipfile wrote other headers then")


@as_today
@pytest.mark.parametrize("size", [94, 95, 96, 97, 98, 99, 100, 101, 102, 300])
def test_zip64_fields_appear_where_zipfile_adds_them(monkeypatch, size):
    monkeypatch.setattr(zip_layout, "_ZIP64_LIMIT", 100)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    entries = [("a", b"x"), ("b", b"y" * size), ("c", b"z" * size)]
    assert framed(entries) == zipped_entries(entries)


@pytest.mark.parametrize("size", [68, 69, 70])
def test_zip64_fields_for_offsets_appear_where_zipfile_adds_them(monkeypatch, size):
    monkeypatch.setattr(zip_layout, "_ZIP64_LIMIT", 100)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    one = [("a", b"x" * size)]  # behind a header of 31 bytes, so that what follows lies at 99, 100 or 101
    assert framed(one) == zipped_entries(one)
    assert framed([*one, ("b", b"")]) == zipped_entries([*one, ("b", b"")])


@as_today
@pytest.mark.parametrize("size", [int(_LIMIT / 1.05), int(_LIMIT / 1.05) + 1, _LIMIT, _LIMIT + 1, 2**33])
def test_headers_of_members_near_two_gibibytes_are_those_of_zipfile(size):
    """Only the headers: zipfile is told the size instead of being given the bytes."""
    info = zipfile.ZipInfo("weights.f32le", date_time=(1980, 1, 1, 0, 0, 0))
    info.create_system, info.file_size, info.compress_size, info.CRC = 0, size, size, 7
    assert join(Member("weights.f32le", size, 7).local_header()) == info.FileHeader(size * 1.05 > _LIMIT)


def test_a_difference_is_named_by_its_field():
    member = Member("a", 5, 1)
    expected = member.local_header()
    data = bytearray(join(expected))
    assert first_difference(bytes(data), expected) is None
    data[10] ^= 1
    assert first_difference(bytes(data), expected) == "time of a"
    assert first_difference(join(expected)[:-1], expected) == "name of a"
    assert first_difference(join(expected) + b"x", expected) == "length"
