"""What is particular to S3: refusals in its words, checksums, parts, servers that do less than asked."""

import base64
import hashlib
import os
import socket

import pytest

from artifacts import StoreError
from artifacts.remote import RemoteStore
from artifacts.retry import Patience
from artifacts.store_marker import MARKER
from tests.artifacts.s3_server import credentials_for, error_body, faulty_proxy, s3_server, shared_bucket

PATIENCE = Patience(sleep=lambda pause: None, answer_timeout=5)
DATA = os.urandom(3_000_000)
DIGEST = hashlib.sha256(DATA).hexdigest()
PLACE = f"/bucket/objects/sha256/{DIGEST[:2]}/{DIGEST}"


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture(scope="module")
def proxy(server):
    with faulty_proxy(server.url) as running, credentials_for(running.url):
        yield running


@pytest.fixture
def remote(server, proxy, monkeypatch) -> RemoteStore:
    """A store that is the whole bucket."""
    server.wipe()
    proxy.reset()
    proxy.dropped = frozenset()
    with monkeypatch.context() as patched:
        patched.setattr("artifacts.remote.open_bucket", shared_bucket)
        remote = RemoteStore.open("s3://bucket", writable=True, patience=PATIENCE)
    proxy.reset()
    return remote


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return path


def refusal(url: str, **options) -> StoreError:
    with pytest.raises(StoreError, match=url) as caught:
        RemoteStore.open(url, patience=PATIENCE, **options)
    return caught.value


@pytest.mark.parametrize("writable", [False, True])
def test_a_bucket_that_does_not_exist_is_named(remote, writable):
    error = refusal("s3://nobody/x", writable=writable)
    assert error.code == "no-bucket"
    assert "create it" in str(error)


def test_an_impossible_bucket_is_a_bad_url(remote):
    assert refusal("s3://no bucket/x").code == "bad-url"


def test_an_endpoint_that_is_no_url_is_named(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "not a url")
    error = refusal("s3://bucket/x")
    assert error.code == "bad-url"
    assert "AWS_ENDPOINT_URL" in str(error)


def test_a_server_that_is_not_there_is_tried_again_and_called_unreachable():
    pauses: list[float] = []
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with credentials_for(address), pytest.raises(StoreError, match="s3://bucket/x") as caught:
            RemoteStore.open("s3://bucket/x", patience=Patience(tries=3, sleep=pauses.append))
    assert caught.value.code == "remote-unreachable"
    assert len(pauses) == 2


def test_without_credentials_the_remedy_is_named(remote, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    error = refusal("s3://bucket/x")
    assert error.code == "remote-denied"
    assert "AWS_ACCESS_KEY_ID" in str(error)


def test_a_server_that_denies_is_not_asked_again(remote, proxy):
    proxy.reset({0: "403"})
    assert refusal("s3://bucket").code == "remote-denied"
    assert len(proxy.seen) == 1


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidToken"])
def test_credentials_that_have_expired_are_a_denial(remote, proxy, code):
    proxy.canned = {"STORE.json": (400, error_body(code))}
    error = refusal("s3://bucket")
    assert error.code == "remote-denied"
    assert "sign in again" in str(error)


def test_a_server_that_sends_on_without_saying_where_is_named(remote, proxy):
    proxy.canned = {"": (301, error_body("PermanentRedirect"))}
    error = refusal("s3://bucket")
    assert error.code == "remote"
    assert "AWS_DEFAULT_REGION" in str(error)


def test_an_object_without_etag_is_refused(remote, proxy):
    proxy.canned = {"STORE.json": (200, MARKER)}
    error = refusal("s3://bucket")
    assert error.code == "remote"
    assert "ETag" in str(error)


_PAGE = b"<ListBucketResult><IsTruncated>%b</IsTruncated>%b</ListBucketResult>"


@pytest.mark.parametrize(
    ("body", "absent"),
    [
        (b"", "IsTruncated"),
        (b"<html>sign in</html>", "IsTruncated"),
        (_PAGE % (b"true", b""), "NextContinuationToken"),
        (_PAGE % (b"false", b"<Contents><Size>1</Size></Contents>"), "Key"),
        (_PAGE % (b"false", b"<Contents><Key>x</Key></Contents>"), "Size"),
    ],
)
def test_a_listing_that_is_none_is_not_an_empty_store(remote, proxy, body, absent):
    proxy.canned = {"list-type": (200, body)}
    for listing in (remote.reference_names, remote.object_sizes):
        with pytest.raises(StoreError, match=f"s3://bucket answers without {absent}") as caught:
            listing()
        assert caught.value.code == "remote"


@pytest.mark.parametrize("ignored", ["If-None-Match", "If-Match"])
def test_a_server_that_ignores_conditions_is_only_read(remote, proxy, server, ignored):
    proxy.dropped = frozenset({ignored})
    error = refusal("s3://bucket", writable=True)
    assert error.code == "no-conditional-writes"
    assert RemoteStore.open("s3://bucket", patience=PATIENCE).reference_names() == []


def test_a_server_that_knows_no_conditions_is_only_read(remote, proxy):
    proxy.reset({1: "501"})
    assert refusal("s3://bucket", writable=True).code == "no-conditional-writes"


def test_a_server_that_ignores_conditions_does_not_become_a_store(remote, proxy, server):
    server.wipe()
    proxy.dropped = frozenset({"If-Match"})
    assert refusal("s3://bucket", writable=True).code == "no-conditional-writes"
    assert server.contents() == {}  # what it was tried on is gone too


def test_an_upload_carries_its_checksum(remote, proxy, source):
    remote.put_object(DIGEST, source)
    assert proxy.seen == [f"PUT {PLACE}"]
    assert base64.b64decode(proxy.headers[0]["x-amz-checksum-sha256"]).hex() == DIGEST


def test_a_download_that_breaks_off_goes_on_at_its_offset(remote, proxy, source):
    remote.put_object(DIGEST, source)
    proxy.reset({0: "truncated", 1: "truncated"})
    assert b"".join(remote.get_object(DIGEST, len(DATA))) == DATA
    assert proxy.seen == [f"GET {PLACE}"] * 3
    starts = [headers.get("Range", "bytes=0-") for headers in proxy.headers]
    assert starts[0] == "bytes=0-"
    assert 0 < int(starts[1][6:-1]) < int(starts[2][6:-1]) < len(DATA)


def test_a_reference_that_cannot_be_one_is_not_read_into_memory(remote, proxy, monkeypatch):
    remote.replace_reference("tags/best", bytes(1000))
    monkeypatch.setattr("artifacts.bucket_s3.LARGEST_VALUE", 999)
    with pytest.raises(StoreError, match="1000 bytes") as caught:
        remote.read_reference("tags/best")
    assert caught.value.code == "damaged"


def test_listings_of_many_pages_are_read_to_their_end(remote, proxy):
    names = [f"tags/{number:04}" for number in range(12)]
    for name in names:
        remote.create_reference(name, b"x")
    proxy.reset()
    proxy.page = 5
    assert remote.reference_names() == names
    assert len(proxy.seen) == 3


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file of three parts; S3 allows none below 5 MiB but the last."""
    monkeypatch.setattr("artifacts.bucket_s3.PART", 5 << 20)
    path = tmp_path / "large"
    path.write_bytes(os.urandom((10 << 20) + 77))
    return path


def test_a_large_object_goes_up_in_checked_parts(remote, proxy, server, large):
    data = large.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    arrived: list[int] = []
    remote.put_object(digest, large, arrived.append)
    assert arrived == [5 << 20, 5 << 20, 77]
    assert [line.split()[0] for line in proxy.seen] == ["POST", "PUT", "PUT", "PUT", "POST"]
    for number, headers in enumerate(proxy.headers[1:4]):
        part = data[number * (5 << 20) :][: 5 << 20]
        assert base64.b64decode(headers["x-amz-checksum-sha256"]) == hashlib.sha256(part).digest()
    assert server.contents()[f"objects/sha256/{digest[:2]}/{digest}"] == data


@pytest.mark.parametrize("fault", ["reset", "503", "truncated", "500"])
def test_a_large_object_survives_every_fault_at_every_request(remote, proxy, server, large, fault):
    data = large.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    for index in range(5):
        server.wipe()
        proxy.reset({index: fault})
        arrived: list[int] = []
        remote.put_object(digest, large, arrived.append)
        assert sum(arrived) == len(data)
        assert server.contents() == {f"objects/sha256/{digest[:2]}/{digest}": data}


def test_a_large_file_of_another_digest_does_not_appear(remote, proxy, server, large):
    before = server.contents()
    with pytest.raises(StoreError, match="damaged"):
        remote.put_object(DIGEST, large)
    assert server.contents() == before
    assert proxy.seen[-1].startswith("DELETE")  # the parts are not kept at the user's cost
