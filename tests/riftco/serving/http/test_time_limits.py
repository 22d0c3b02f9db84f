"""Clients that are slow, silent or gone: each has its time, and nobody else notices."""

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from time import monotonic
from urllib.parse import urlsplit

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server
from riftco.serving.http.access import Access, ApiKey
from riftco.serving.http.limits import TimeLimits
from riftco.serving.http.protocol import ServingProtocol
from tests.riftco.serving.http.support import any_text_bundle, get
from tests.riftco.serving.http.wire import connect, exchange, post, read_answer, read_stream, wait_until

LIMITS = TimeLimits(head=0.3, body=1.0, body_silence=0.3, write=0.3)
QUICK = TimeLimits(head=0.6, body=2.0, body_silence=0.6, write=0.6)
LONG = {"prompt": "a", "max_new_tokens": 2_000, "stream": True, "logprobs": 20}
BEGINNINGS = (
    b"",
    b"G",
    b"GET /health HTTP/1.1\r\nHost: local",
    b"\r\n\r\n",
    get("/health")[:-2],
    get("/health") + b"GET /he",
    get("/health").replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\nabc"),
    post(b"x" * 50)[:-20],
    post({"prompt": "a", "max_new_tokens": 1}) + post(b"x" * 50)[:-20],
    b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
)


@pytest.fixture(scope="module")
def service() -> Iterator[ModelService]:
    with ModelService(any_text_bundle(), ServingConfig(backend="cpu", maximum_new_tokens=2_000)) as service:
        yield service


@pytest.fixture(scope="module")
def url(service: ModelService) -> Iterator[str]:
    with background_server(service, limits=LIMITS) as url:
        yield url


def test_by_default_a_silent_connection_is_closed_within_ten_seconds() -> None:
    limits, linger = TimeLimits(), 1.0
    keep_alive = 5.0  # uvicorn's
    assert max(keep_alive + limits.head, limits.body_silence + linger, limits.write) <= 10


@pytest.mark.parametrize("beginning", BEGINNINGS, ids=lambda b: b[:60].decode())
def test_a_connection_that_stays_silent_is_closed(url: str, beginning: bytes) -> None:
    with connect(url) as connection, connection.makefile("rb") as stream:
        connection.sendall(beginning)
        stream.read()  # to the end


def test_a_head_may_come_slowly_but_not_for_ever(url: str) -> None:
    begin = monotonic()  # the server counts from connecting
    with connect(url) as connection, connection.makefile("rb") as stream:
        connection.settimeout(0.05)
        for number in range(1_000):
            connection.sendall(b"GET /health HTTP/1.1\r\n" if number == 0 else b"X: y\r\n")
            try:
                if not connection.recv(1, socket.MSG_PEEK):
                    break
            except TimeoutError:
                continue
            connection.settimeout(10)
            answer = read_answer(stream)
            assert (answer.status, answer.json["error"]) == (408, "Request Timeout")
            assert answer.headers["connection"] == "close"
            assert monotonic() - begin >= LIMITS.head
            return
    raise AssertionError("the head was awaited for ever")


@pytest.mark.parametrize(("seconds", "detail"), [(0.05, "did not arrive within 1"), (5, "stopped arriving")])
def test_a_body_that_drips_or_stops_is_a_408(url: str, seconds: float, detail: str) -> None:
    with connect(url) as connection, connection.makefile("rb") as stream:
        connection.sendall(post(b"x" * 5_000)[:-5_000])
        connection.settimeout(seconds)
        while True:
            connection.sendall(b"x")
            try:
                connection.recv(1, socket.MSG_PEEK)
                break
            except TimeoutError:
                continue
        connection.settimeout(10)
        answer = read_answer(stream)
    assert answer.status == 408
    assert detail in answer.json["detail"]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of which the system holds a few kilobytes only, so that a client's laziness shows soon."""
    made = ServingProtocol.connection_made

    def connection_made(self: ServingProtocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        made(self, transport)

    monkeypatch.setattr(ServingProtocol, "connection_made", connection_made)


def narrow(url: str) -> socket.socket:
    """A connection whose client's system holds little of what it does not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
    connection.settimeout(20)
    parts = urlsplit(url)
    connection.connect((parts.hostname, parts.port))
    return connection


@pytest.mark.usefixtures("small_buffers")
def test_a_client_that_does_not_read_is_given_up(url: str, service: ModelService) -> None:
    before = service.engine.stats().requests_finished.get("cancelled", 0)
    with narrow(url) as lazy:
        lazy.sendall(post(LONG))
        assert wait_until(lambda: service.engine.stats().requests_finished.get("cancelled", 0) > before)
        assert exchange(url, get("/health")).status == 200
        assert lazy.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET
    stats = service.engine.stats()
    assert (stats.running, stats.free_pages) == (0, stats.pages)


@pytest.mark.usefixtures("small_buffers")
def test_a_client_that_asks_on_without_reading_is_given_up(url: str) -> None:
    with narrow(url) as lazy:
        lazy.sendall(get("/") * 20)
        assert wait_until(lambda: lazy.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET)


@pytest.mark.usefixtures("small_buffers")
def test_a_client_that_reads_steadily_gets_everything(url: str) -> None:
    with narrow(url) as slow, slow.makefile("rb", buffering=512) as stream:
        slow.sendall(post(LONG | {"max_new_tokens": 100}))
        events = read_stream(stream)
    assert sum(len(event.get("token_ids", ())) for event in events) == 100


@pytest.mark.usefixtures("small_buffers")
def test_an_answer_is_in_progress_until_it_is_read(service: ModelService) -> None:
    access = Access([ApiKey("somebody", sha256(b"key").digest(), concurrent=1)])

    def ask(prompt: str) -> bytes:
        request = post({"prompt": prompt, "max_new_tokens": 1})
        return request.replace(b"Host:", b"Authorization: Bearer key\r\nHost:")

    with (
        background_server(service, access=access) as url,
        narrow(url) as slow,
        slow.makefile("rb", buffering=512) as stream,
    ):
        slow.sendall(ask("a" * 20_000))
        slow.recv(1, socket.MSG_PEEK)
        assert exchange(url, ask("a")).status == 429
        assert len(read_answer(stream).json["prompt_token_ids"]) == 20_000
        assert wait_until(lambda: exchange(url, ask("a")).status == 200)


def open_half(url: str, count: int) -> list[socket.socket]:
    connections = []
    for number in range(count):
        connection = connect(url)
        connection.sendall(BEGINNINGS[number % len(BEGINNINGS)])
        connections.append(connection)
    return connections


def drain(connection: socket.socket) -> None:
    """Read to the end, which must come."""
    with connection, suppress(ConnectionResetError):
        while connection.recv(65_536):
            pass


@pytest.mark.parametrize(
    ("count", "limits"), [(50, QUICK), pytest.param(500, TimeLimits(), marks=pytest.mark.soak)]
)
def test_half_open_connections_are_closed_while_others_are_served(
    service: ModelService, count: int, limits: TimeLimits
) -> None:
    with background_server(service, limits=limits) as url:
        begin = monotonic()
        connections = open_half(url, count)
        for _ in range(10):
            assert exchange(url, post({"prompt": "a", "max_new_tokens": 2})).status == 200
            assert exchange(url, get("/health")).status == 200
        for connection in connections:
            connection.settimeout(30)
            drain(connection)
        if count == 500:
            assert monotonic() - begin <= 10
        assert exchange(url, get("/health")).status == 200
