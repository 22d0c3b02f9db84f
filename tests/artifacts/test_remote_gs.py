"""Google Cloud Storage, as far as `fake-gcs-server` (github.com/fsouza) goes; skipped without it."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from artifacts import Store, StoreError
from artifacts.remote import RemoteStore
from artifacts.retry import Patience
from artifacts.transfer import pull, push
from tests.artifacts.remote_stores import contents, full_store

PROGRAM = shutil.which("fake-gcs-server")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="fake-gcs-server is not installed")
PATIENCE = Patience(sleep=lambda pause: None)
STEP = f"steps/{'5' * 64}"


@pytest.fixture(scope="module")
def url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [PROGRAM, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    with subprocess.Popen(
        [*command, "-public-host", f"127.0.0.1:{port}"], stderr=subprocess.DEVNULL
    ) as server:
        try:
            create_bucket(address)
            yield address
        finally:
            server.terminate()


def create_bucket(address: str) -> None:
    body = json.dumps({"name": "bucket"}).encode()
    for _ in range(100):
        try:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{address}/storage/v1/b?project=test", body, headers)
            urllib.request.urlopen(request).close()
            return
        except urllib.error.URLError:
            time.sleep(0.1)
    raise TimeoutError("fake-gcs-server does not answer")


@pytest.fixture
def remote(url, monkeypatch, request) -> RemoteStore:
    pytest.importorskip("gcsfs")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    return RemoteStore.open(f"gs://bucket/{request.node.name}", writable=True, patience=PATIENCE)


def test_a_store_pushed_and_pulled_is_the_same_store(remote, tmp_path):
    source = full_store(tmp_path / "source")
    push(source, remote)
    assert push(source, remote).skipped == len(contents(source.root))
    target = Store.open(tmp_path / "target", durability="none")
    pull(target, RemoteStore.open(remote.url, patience=PATIENCE))
    assert contents(target.root) == contents(source.root)


def test_conditions_of_writes_are_kept(remote):
    assert remote.create_reference(STEP, b"first")
    assert not remote.create_reference(STEP, b"second")
    assert remote.create_reference(STEP, b"first")
    assert not remote.swap_reference(STEP, b"2", b"0")
    assert remote.swap_reference(STEP, b"2", b"first")
    assert remote.swap_reference(STEP, b"2", b"first")
    assert remote.read_reference(STEP) == b"2"
    assert remote.reference_names() == [STEP]
    assert remote.read_reference("tags/absent") is None


@pytest.mark.filterwarnings("ignore:Sending a large body")  # by gcsfs, as bytes
def test_large_objects_go_up_in_parts_and_come_down_in_pieces(remote, tmp_path, monkeypatch):
    monkeypatch.setattr("artifacts.bucket_gs.PART", 1 << 20)
    monkeypatch.setattr("artifacts.bucket_gs._PIECE", 1 << 20)
    data = os.urandom((2 << 20) + 7)
    path, digest = tmp_path / "large", hashlib.sha256(data).hexdigest()
    path.write_bytes(data)
    remote.put_object(digest, path)
    assert remote.object_sizes() == {digest: len(data)}
    assert b"".join(remote.get_object(digest, len(data))) == data
    with pytest.raises(StoreError, match="damaged"):
        remote.put_object("0" * 64, path)


def test_a_bucket_that_does_not_exist_is_named(remote):
    with pytest.raises(StoreError, match="gs://nobody/x"):
        RemoteStore.open("gs://nobody/x", writable=True, patience=PATIENCE)
