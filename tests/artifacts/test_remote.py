"""A remote store, whatever it lies in: what it promises about objects and references, and what it refuses."""

import errno
import fcntl
import hashlib
import os
import threading
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from artifacts import StoreError
from artifacts.bucket_folder import FolderBucket
from artifacts.canonical_json import canonical_json
from artifacts.remote import RemoteStore
from artifacts.retry import Patience
from tests.artifacts.s3_server import credentials_for, faulty_proxy, s3_server, shared_bucket

PATIENCE = Patience(sleep=lambda pause: None)
DATA = bytes(range(256)) * 5000
DIGEST = hashlib.sha256(DATA).hexdigest()
KEY = f"objects/sha256/{DIGEST[:2]}/{DIGEST}"
STEP = f"steps/{'5' * 64}"


@pytest.fixture(scope="module")
def server():
    with s3_server() as running, faulty_proxy(running.url) as proxy, credentials_for(proxy.url):
        yield running  # behind the proxy, since moto looks first and writes then: one request at a time


@pytest.fixture(params=["s3", "file", "memory"])
def url(request, tmp_path, monkeypatch) -> str:
    if request.param == "s3":
        monkeypatch.setattr("artifacts.remote.open_bucket", shared_bucket)
        request.getfixturevalue("server").wipe()
        return "s3://bucket/some/folder"
    MemoryFileSystem.store.clear()
    return "memory://stores/one" if request.param == "memory" else f"file://{tmp_path}/remote"


@pytest.fixture
def remote(url) -> RemoteStore:
    return RemoteStore.open(url, writable=True, patience=PATIENCE)


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return path


def code_of(call, *arguments, **options) -> str:
    with pytest.raises(StoreError) as caught:
        call(*arguments, **options)
    return caught.value.code


def put_raw(remote: RemoteStore, key: str, data: bytes) -> None:
    remote._bucket.write(key, data)


def keys(remote: RemoteStore) -> set[str]:
    return {key for key, _ in remote._bucket.sizes("") if not key.startswith("locks/")}


def test_an_empty_place_becomes_a_store_and_nothing_else_is_left_there(remote):
    assert keys(remote) == {"STORE.json"}
    assert remote.reference_names() == []
    again = RemoteStore.open(remote.url + "/", writable=True, patience=PATIENCE)
    assert keys(again) == {"STORE.json"}
    assert again.url == remote.url


def test_a_place_without_a_store_is_not_opened_for_reading(url):
    assert code_of(RemoteStore.open, url, patience=PATIENCE) == "not-a-store"


def test_a_place_that_holds_something_else_is_left_alone(remote, url):
    put_raw(remote, "holiday.jpg", b"x")
    remote._bucket.remove("STORE.json")
    with pytest.raises(StoreError, match=r"holiday\.jpg") as caught:
        RemoteStore.open(url, writable=True, patience=PATIENCE)
    assert caught.value.code == "not-a-store"
    assert keys(remote) == {"holiday.jpg"}


@pytest.mark.parametrize(
    ("marker", "code"),
    [
        (canonical_json({"format": "riftco-store", "version": 2, "hash": "sha256"}), "newer-store"),
        (canonical_json({"format": "other", "version": 1, "hash": "sha256"}), "not-a-store"),
        (b"[]", "not-a-store"),
        (b"{", "not-a-store"),
        (b"", "not-a-store"),
    ],
)
def test_a_store_of_another_format_or_version_is_refused(remote, url, marker, code):
    put_raw(remote, "STORE.json", marker)
    for writable in (False, True):
        with pytest.raises(StoreError, match=url) as caught:
            RemoteStore.open(url, writable=writable, patience=PATIENCE)
        assert caught.value.code == code


def test_a_preview_of_an_empty_place_is_an_empty_store_and_makes_none(url, tmp_path):
    remote = RemoteStore.preview(url, patience=PATIENCE)
    assert remote.reference_names() == []
    assert remote.object_sizes() == {}
    assert keys(remote) == set()
    assert list(tmp_path.iterdir()) == []
    put_raw(remote, "holiday.jpg", b"x")
    assert code_of(RemoteStore.preview, url, patience=PATIENCE) == "not-a-store"


def test_what_was_opened_for_reading_is_not_written(remote, url, source):
    reader = RemoteStore.open(url, patience=PATIENCE)
    assert code_of(reader.put_object, DIGEST, source) == "not-writable"
    assert code_of(reader.keep_objects, [DIGEST]) == "not-writable"
    assert code_of(reader.keep_references, [STEP]) == "not-writable"
    assert code_of(reader.create_reference, STEP, b"1") == "not-writable"
    assert code_of(reader.replace_reference, STEP, b"1") == "not-writable"
    assert code_of(reader.swap_reference, STEP, b"1", None) == "not-writable"
    assert keys(remote) == {"STORE.json"}


def test_objects_are_put_and_got(remote, source):
    assert remote.object_sizes() == {}
    arrived: list[int] = []
    remote.put_object(DIGEST, source, arrived.append)
    assert sum(arrived) == len(DATA)
    assert remote.object_sizes() == {DIGEST: len(DATA)}
    assert b"".join(remote.get_object(DIGEST, len(DATA))) == DATA
    assert keys(remote) == {"STORE.json", KEY}
    remote.put_object(DIGEST, source)
    assert b"".join(remote.get_object(DIGEST, len(DATA))) == DATA


def test_the_empty_object_is_put_and_got(remote, tmp_path):
    path, digest = tmp_path / "empty", hashlib.sha256(b"").hexdigest()
    path.write_bytes(b"")
    remote.put_object(digest, path)
    assert remote.object_sizes() == {digest: 0}
    assert b"".join(remote.get_object(digest, 0)) == b""


def test_a_file_of_another_digest_is_not_uploaded(remote, source):
    source.write_bytes(DATA[:-1] + b"?")
    assert code_of(remote.put_object, DIGEST, source) == "damaged"
    assert keys(remote) == {"STORE.json"}


def test_a_file_that_cannot_be_read_is_a_store_error(remote, tmp_path):
    assert code_of(remote.put_object, DIGEST, tmp_path / "absent") == "disk"


@pytest.mark.parametrize("data", [b"", DATA[:-1], DATA[:-1] + b"?", DATA + b"?"])
def test_a_damaged_object_is_noticed_while_it_is_read_and_replaced_by_putting_it_again(remote, source, data):
    put_raw(remote, KEY, data)
    with pytest.raises(StoreError, match=f"{DIGEST} at {remote.url} is damaged") as caught:
        list(remote.get_object(DIGEST, len(DATA)))
    assert caught.value.code == "damaged"
    remote.put_object(DIGEST, source)
    assert b"".join(remote.get_object(DIGEST, len(DATA))) == DATA


def test_a_missing_object_is_called_missing(remote):
    assert code_of(list, remote.get_object(DIGEST, len(DATA))) == "missing"


def test_what_lies_elsewhere_among_the_objects_is_no_object(remote):
    for key in (f"objects/sha256/00/{DIGEST}", f"objects/{DIGEST}", "objects/sha256/note"):
        put_raw(remote, key, b"x")
    assert remote.object_sizes() == {}


def test_a_reference_is_created_once(remote):
    assert remote.read_reference(STEP) is None
    assert remote.create_reference(STEP, b"first")
    assert not remote.create_reference(STEP, b"second")
    assert remote.create_reference(STEP, b"first")  # as when the answer to the first time was lost
    assert remote.read_reference(STEP) == b"first"


def test_a_reference_is_replaced(remote):
    for data in (b"first", b"second"):
        remote.replace_reference("runs/demo/train", data)
        assert remote.read_reference("runs/demo/train") == data


def test_a_reference_is_swapped_only_from_what_it_was(remote):
    assert not remote.swap_reference("tags/best", b"1", b"0")
    assert remote.swap_reference("tags/best", b"1", None)
    assert not remote.swap_reference("tags/best", b"2", None)
    assert not remote.swap_reference("tags/best", b"2", b"0")
    assert remote.read_reference("tags/best") == b"1"
    assert remote.swap_reference("tags/best", b"2", b"1")
    assert remote.swap_reference("tags/best", b"2", b"1")  # as when the answer to the first time was lost
    assert remote.read_reference("tags/best") == b"2"


def test_reference_names_are_listed_in_the_order_to_write_them(remote):
    names = [f"artifacts/{'a' * 64}", STEP, "runs/a/b", "runs/a/c", "runs/b/a", "tags/best"]
    for name in reversed(names):
        remote.replace_reference(name, b"x")
    for stray in ("refs/tags/.hidden", "refs/steps/short", "refs/other/x", "refs/runs/a"):
        if not remote.url.startswith("file") or stray != "refs/runs/a":  # a folder of this name is there
            put_raw(remote, stray, b"x")
    assert remote.reference_names() == names


def test_a_linked_folder_is_listed_like_any_other(tmp_path):
    remote = RemoteStore.open(f"file://{tmp_path}/remote", writable=True)
    remote.create_reference("runs/demo/train", b"x")
    (tmp_path / "remote" / "refs" / "runs").rename(tmp_path / "elsewhere")
    (tmp_path / "remote" / "refs" / "runs").symlink_to(tmp_path / "elsewhere")
    assert remote.reference_names() == ["runs/demo/train"]
    (tmp_path / "elsewhere").rename(tmp_path / "nowhere")
    assert code_of(remote.reference_names) == "disk"  # not an empty store


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_left_out(tmp_path, monkeypatch):
    remote = RemoteStore.open(f"file://{tmp_path}/remote", writable=True)
    for name in ("runs/demo/train", "tags/best"):
        remote.create_reference(name, b"x")
    scan = os.scandir

    def scandir(folder):
        if str(folder).endswith("refs/runs"):  # modes of folders do not stop a superuser
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(StoreError, match="refs/runs") as caught:
        remote.reference_names()
    assert caught.value.code == "not-readable"


def test_what_is_tried_out_in_a_folder_is_safe_from_a_collector(tmp_path, monkeypatch):
    """It removes all that lies in `tmp` while it holds the store alone."""
    create, locked = FolderBucket.create, []

    def look(bucket, key, data):
        with (tmp_path / "remote" / "locks" / "store.lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked.append(False)
            except BlockingIOError:
                locked.append(True)
        create(bucket, key, data)

    monkeypatch.setattr(FolderBucket, "create", look)
    RemoteStore.open(f"file://{tmp_path}/remote", writable=True)
    assert locked == [True] * 3


@pytest.mark.parametrize("name", ["", "tags", "tags/../x", "steps/short", "runs/a", "runs/a/b/c", "other/x"])
def test_a_reference_must_have_a_name_that_a_store_can_hold(remote, name):
    assert code_of(remote.read_reference, name) == "bad-name"
    assert code_of(remote.create_reference, name, b"x") == "bad-name"
    assert code_of(remote.swap_reference, name, b"x", None) == "bad-name"


@pytest.mark.parametrize("kind", ["create", "swap"])
def test_of_two_writers_in_a_race_one_wins(url, kind):
    remotes = [RemoteStore.open(url, writable=True, patience=PATIENCE) for _ in range(2)]
    for turn in range(10):
        name, barrier, won = f"tags/tag{turn}", threading.Barrier(2), [False, False]
        if kind == "swap":
            remotes[0].create_reference(name, b"start")

        def write(index, name=name, barrier=barrier, won=won):
            data = f"writer {index}".encode()
            barrier.wait()
            if kind == "create":
                won[index] = remotes[index].create_reference(name, data)
            else:
                won[index] = remotes[index].swap_reference(name, data, b"start")

        threads = [threading.Thread(target=write, args=[index]) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won) == [False, True]
        assert remotes[0].read_reference(name) == f"writer {won.index(True)}".encode()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "s3",
        "s3://",
        "s3:///",
        "ftp://host/x",
        "/folder",
        "file://",
        "http://bucket/x",
        "file://folder/store",
        "file://~/store",
    ],
)
def test_a_url_that_names_no_remote_store_is_refused(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=r"s3://bucket/folder.*file:///folder \(three slashes\)") as caught:
        RemoteStore.open(url, writable=True)
    assert caught.value.code == "bad-url"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs.core")])
def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch, scheme, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(StoreError, match=rf"pip install 'riftco\[{scheme}\]'") as caught:
        RemoteStore.open(f"{scheme}://bucket/x")
    assert caught.value.code == "missing-package"


def test_a_folder_that_cannot_be_written_is_a_store_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert code_of(RemoteStore.open, f"file://{tmp_path}/file/store", writable=True) == "disk"
