"""Objects: content-addressed, complete or absent, repaired when damaged."""

import errno
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import StoreError
from artifacts.object_folder import ObjectFolder


@pytest.fixture
def objects(tmp_path) -> ObjectFolder:
    return ObjectFolder(tmp_path, sync=False)


def damage(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


@settings(max_examples=30)
@given(chunks=st.lists(st.binary()), expected=st.integers(0, 100))
def test_an_object_is_named_by_the_hash_of_its_bytes(tmp_path_factory, chunks, expected):
    objects = ObjectFolder(tmp_path_factory.mktemp("objects"), sync=False)
    digest = objects.put(chunks, expected)  # the expected size is a hint, not a promise
    data = b"".join(chunks)
    assert digest == hashlib.sha256(data).hexdigest()
    assert objects.read(digest) == data
    assert objects.size(digest) == len(data)
    objects.check(digest)


def test_an_object_is_read_only_and_lies_in_a_folder_of_its_first_digits(objects, tmp_path):
    digest = objects.put([b"abc"], 3)
    path = tmp_path / "objects" / "sha256" / digest[:2] / digest
    assert objects.path(digest) == path
    assert path.stat().st_mode & 0o777 == 0o444
    assert path.stat().st_nlink == 1
    assert os.listdir(tmp_path / "tmp") == []


def test_the_same_bytes_are_stored_once(objects):
    digest = objects.put([b"abc"], 3)
    before = objects.path(digest).stat()
    assert objects.put([b"ab", b"c"], 3) == digest
    assert objects.path(digest).stat().st_ino == before.st_ino


def test_a_missing_object_is_called_missing(objects):
    for read in (objects.check, objects.read, objects.size):
        with pytest.raises(StoreError, match="missing") as caught:
            read("0" * 64)
        assert caught.value.code == "missing"


@pytest.mark.parametrize("content", [b"", b"abd", b"abcd"])
def test_a_damaged_object_is_noticed_kept_aside_and_replaced(objects, tmp_path, content):
    digest = objects.put([b"abc"], 3)
    damage(objects.path(digest), content)
    for read in (objects.check, objects.read):
        with pytest.raises(StoreError, match="damaged") as caught:
            read(digest)
        assert caught.value.code == "damaged"
    assert objects.put([b"abc"], 3) == digest
    assert objects.read(digest) == b"abc"
    (kept,) = (tmp_path / "quarantine").glob("*/*")
    assert kept.name.startswith(f"{digest}.damaged-")
    assert kept.read_bytes() == content


def test_a_source_that_fails_leaves_nothing(objects, tmp_path):
    def chunks():
        yield b"abc"
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        objects.put(chunks(), 10)
    assert list(objects.digests()) == []
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "disk-full"),
        (errno.EDQUOT, "disk-full"),
        (errno.EROFS, "not-writable"),
        (errno.EACCES, "not-writable"),
        (errno.EIO, "disk"),
        (errno.EFBIG, "disk"),
    ],
)
@pytest.mark.parametrize("call", ["posix_fallocate", "write", "fsync", "fchmod", "link"])
def test_a_refusing_disk_is_a_store_error_and_leaves_nothing(tmp_path, monkeypatch, number, code, call):
    objects = ObjectFolder(tmp_path, sync=True)

    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(os, call, refuse)
        with pytest.raises(StoreError, match=str(tmp_path)) as caught:
            objects.put([b"abc"], 3)
    assert caught.value.code == code
    assert list(objects.digests()) == []
    assert os.listdir(tmp_path / "tmp") == []
    assert objects.read(objects.put([b"abc"], 3)) == b"abc"


def test_digests_are_found_by_their_beginning(objects):
    digests = sorted(objects.put([bytes([byte])], 1) for byte in range(40))
    (objects.path(digests[0]).parent / "stray").write_text("not an object")
    assert sorted(objects.digests()) == digests
    for prefix in (digests[0][:1], digests[0][:2], digests[0][:9], digests[0]):
        assert sorted(objects.digests(prefix)) == [digest for digest in digests if digest.startswith(prefix)]
    assert list(objects.digests("f" * 64)) == []


def test_only_files_at_their_place_are_objects(objects, tmp_path):
    digest = objects.put([b"abc"], 3)
    shard = tmp_path / "objects" / "sha256" / "ab"
    (shard / ("ab" + "0" * 62)).mkdir(parents=True)
    (shard / ("ab" + "1" * 62)).symlink_to(objects.path(digest))
    (shard / ("cd" + "0" * 62)).write_text("in another's place")
    assert list(objects.digests()) == [digest]


def test_a_shard_that_cannot_be_read_is_an_error_and_not_empty(objects, monkeypatch):
    digest, scandir = objects.put([b"abc"], 3), os.scandir

    def denied(path):
        if Path(path).name == digest[:2]:
            raise PermissionError(errno.EACCES, "denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(StoreError, match="denied") as caught:
        objects.digests()
    assert caught.value.code == "not-readable"
