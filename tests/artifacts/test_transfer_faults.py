"""Every request of a push and a pull meets every fault: nothing is lost, and nothing is wrong."""

import hashlib

import pytest

from artifacts import Store, StoreError
from artifacts.remote import RemoteStore
from artifacts.retry import Patience
from artifacts.transfer import pull, push
from tests.artifacts.remote_stores import contents, small_store
from tests.artifacts.s3_server import FAULTS, HANG, credentials_for, faulty_proxy, s3_server, shared_bucket

URL = "s3://bucket/store"
PATIENT = Patience(answer_timeout=HANG * 0.75, sleep=lambda pause: None)
IMPATIENT = Patience(tries=1, sleep=lambda pause: None)


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture(scope="module")
def proxy(server):
    with faulty_proxy(server.url) as running, credentials_for(running.url):
        yield running


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Store:
    return small_store(tmp_path_factory.mktemp("source"))


@pytest.fixture
def remote(server, proxy, monkeypatch) -> RemoteStore:
    """An empty remote store, opened for writing."""
    monkeypatch.setattr("artifacts.remote.open_bucket", shared_bucket)
    server.wipe()
    proxy.reset()
    remote = RemoteStore.open(URL, writable=True, patience=PATIENT)
    proxy.reset()
    return remote


def expected(source: Store) -> dict[str, bytes]:
    files = {f"store/{name}": data for name, data in contents(source.root).items()}
    return files | {"store/STORE.json": (source.root / "STORE.json").read_bytes()}


def test_an_unknown_outcome_of_every_request_of_an_opening_is_survived(server, proxy, remote):
    server.wipe()
    RemoteStore.open(URL, writable=True, patience=PATIENT)
    count = len(proxy.seen)
    assert count == 11
    for fault in ("truncated", "lost", "500"):
        for index in range(count):
            server.wipe()
            proxy.reset({index: fault})
            RemoteStore.open(URL, writable=True, patience=PATIENT)
            assert len(proxy.seen) > index
            assert list(server.contents()) == ["store/STORE.json"], (fault, index)


def test_every_fault_at_every_request_of_a_push_is_survived(server, proxy, source, remote):
    push(source, remote)
    count = len(proxy.seen)
    assert (
        count >= 2 * len(contents(source.root)) + 1
    )  # all are looked for and written, the object in a listing
    for fault in FAULTS:
        for index in range(count):
            server.wipe(but="store/STORE.json")
            proxy.reset({index: fault})
            push(source, remote)
            assert len(proxy.seen) > index
            assert server.contents() == expected(source), (fault, index)


def test_every_fault_at_every_request_of_a_pull_is_survived(proxy, source, remote, tmp_path):
    push(source, remote)
    proxy.reset()
    pull(Store.open(tmp_path / "first", durability="none"), remote)
    count = len(proxy.seen)
    assert count == len(contents(source.root)) + 3  # two listings of references, one of objects
    for fault in FAULTS:
        for index in range(count):
            proxy.reset({index: fault})
            store = Store.open(tmp_path / f"{fault}-{index}", durability="none")
            pull(store, remote)
            assert contents(store.root) == contents(source.root), (fault, index)


def assert_whole(files: dict[str, bytes], source: Store) -> None:
    """What is there is right, and every reference has its objects."""
    for name, data in files.items():
        assert data == expected(source)[name]
        assert name.count("objects/") == 0 or name.endswith(hashlib.sha256(data).hexdigest())
    if any("/refs/" in name for name in files):
        assert {name for name in expected(source) if "/objects/" in name} <= files.keys()
    if any("/refs/runs/" in name for name in files):
        assert {name for name in expected(source) if "/refs/steps/" in name} <= files.keys()


def test_a_push_that_gives_up_anywhere_leaves_a_whole_store_and_goes_on_when_repeated(
    server, proxy, source, remote
):
    remote = RemoteStore.open(URL, writable=True, patience=IMPATIENT)
    proxy.reset()
    whole = push(source, remote)
    for index in range(len(proxy.seen)):
        server.wipe(but="store/STORE.json")
        proxy.reset({index: "500"})  # not "lost": the HTTP library may try again below us
        with pytest.raises(StoreError, match=URL) as caught:
            push(source, remote)
        assert caught.value.code == "remote-unreachable"
        before = server.contents()
        assert_whole(before, source)
        done = push(source, remote)
        assert server.contents() == expected(source)
        assert done.objects + done.references + done.skipped == whole.objects + whole.references
        assert done.skipped >= len(before) - 1  # all but STORE.json


def test_a_pull_that_gives_up_anywhere_leaves_a_whole_store_and_goes_on_when_repeated(
    proxy, source, remote, tmp_path
):
    push(source, remote)
    remote = RemoteStore.open(URL, patience=IMPATIENT)
    proxy.reset()
    pull(Store.open(tmp_path / "first", durability="none"), remote)
    for index in range(len(proxy.seen)):
        proxy.reset({index: "500"})
        store = Store.open(tmp_path / str(index), durability="none")
        with pytest.raises(StoreError, match=URL) as caught:
            pull(store, remote)
        assert caught.value.code == "remote-unreachable"
        assert_whole({f"store/{name}": data for name, data in contents(store.root).items()}, source)
        pull(store, remote)
        assert contents(store.root) == contents(source.root)
