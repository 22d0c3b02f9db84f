"""Requests no client should send: each is answered or its connection closed, and the server goes on."""

import json
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server
from riftco.serving.http.limits import TimeLimits
from tests.riftco.serving.http.support import any_text_bundle, get
from tests.riftco.serving.http.wire import connect, exchange, post

CONFIG = ServingConfig(backend="cpu", maximum_new_tokens=4, maximum_request_bytes=200_000)
LIMITS = TimeLimits(head=0.5, body=1.0, body_silence=0.5, write=1.0)
UNKNOWN_CODING = b"501"  # of a Transfer-Encoding: RFC 9112, 6.1
GENERATE = {"prompt": "a", "max_new_tokens": 1, "temperature": 0.5, "top_k": 2, "seed": 1}
COMPLETE = {"model": "riftco", "prompt": "a", "max_tokens": 1, "n": 1, "stop": ["x"], "logprobs": 1}
CHAT = {"model": "riftco", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
BODIES = (("/v1/generate", GENERATE), ("/v1/completions", COMPLETE), ("/v1/chat/completions", CHAT))
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63, 2**64, 10**400, 1.5, -0.0, 1e308, "", "a", "\x00", "\ud800", [], {}, [[]]),
    *([None] * 3, {"a": {}}, ["a", 1], [-1], [2**40], "9" * 5_000),
)
ODD_TEXTS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1" * 5_000, b"[" * 5_000, b"{" * 99, b'"\\ud800"')
ODD_HEADERS = (
    *(b"Host: evil.example", b"Host: localhost, evil", b"Host:", b"Host: [::1", b"Host: localhost:99999"),
    *(b"Content-Length: 5", b"Content-Length: -5", b"Content-Length: 5, 5", b"Content-Length: 1e3"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: x"),
    *(b"Expect: 100-continue", b"Expect: y", b"Connection: close", b"Connection: Upgrade\r\nUpgrade: h2c"),
    *(b"Content-Type: text/plain", b"Authorization: Bearer x", b"X: " + b"y" * 70_000, b": z", b" folded"),
    *(b"\x00: a", b"A\xff: b", b"A: \xff\xfe", b"A: b\rC: d", b"no colon"),
)
ODD_LINES = (
    *(b"GET /health HTTP/1.1", b"GET /health HTTP/1.0", b"GET /health HTTP/0.9", b"GET /health HTTP/9.9"),
    *(b"get /health HTTP/1.1", b"GET  /health HTTP/1.1", b"GET /health", b"GET", b"", b"\x16\x03\x01"),
    *(b"GET http://evil/ HTTP/1.1", b"GET //evil/health HTTP/1.1", b"GET /%2e%2e/%00 HTTP/1.1"),
    *(b"CONNECT evil:80 HTTP/1.1", b"PRI * HTTP/2.0", b"TRACE / HTTP/1.1", b"DELETE /v1/models/x HTTP/1.1"),
    *(b"GET /v1/models/" + b"a" * 60_000 + b" HTTP/1.1", b"GET /v1/models/%ff HTTP/1.1"),
    *(b"POST /v1/generate HTTP/1.1", b"POST /metrics HTTP/1.1", b"HEAD / HTTP/1.1", b"GET /?a HTTP/1.1"),
)


def odd_fields(rng: random.Random) -> bytes:
    """A good body with one value that is not."""
    path, body = rng.choice(BODIES)
    name = rng.choice([*body, "stream", "extra"])
    text = json.dumps(body | {name: "@"})
    if rng.random() < 0.5:
        return post(text.replace('"@"', json.dumps(rng.choice(ODD_VALUES))).encode(), path)
    return post(text.encode().replace(b'"@"', rng.choice(ODD_TEXTS)), path)


def odd_body(rng: random.Random) -> bytes:
    """A body cut, doubled, or with some bytes replaced."""
    path, body = rng.choice(BODIES)
    data = bytearray(json.dumps(body).encode())
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        data[place : place + rng.randint(0, 5)] = rng.randbytes(rng.randint(0, 5))
        data = data or bytearray(b"{")
    return post(bytes(data) * rng.choice([1, 1, 1, 2]), path)


def odd_head(rng: random.Random) -> bytes:
    """A head of which some lines are odd, before a body that may be right."""
    lines = [
        rng.choice([rng.choice(ODD_LINES), b"POST /v1/generate HTTP/1.1"]),
        *([b"Host: localhost"] * (rng.random() < 0.8)),
        *([b"Content-Type: application/json"] * (rng.random() < 0.8)),
        *rng.choices(ODD_HEADERS, k=rng.randint(0, 3)),
    ]
    body = json.dumps(GENERATE).encode()
    if rng.random() < 0.5:
        lines.append(b"Content-Length: %d" % (len(body) + rng.choice([0, 0, -3, 3, 10**6, 10**30])))
    end = rng.choice([b"\r\n\r\n", b"\r\n\r\n", b"\n\n", b"\r\n", b"\r\n\r\n\r\n"])
    return rng.choice([b"\r\n", b"\r\n", b"\r\n", b"\n"]).join(lines) + end + body


def odd_bytes(rng: random.Random) -> bytes:
    """Noise, or a good request with a few bytes replaced, or several requests run together."""
    if rng.random() < 0.3:
        return rng.randbytes(rng.randint(1, 3_000))
    path, body = rng.choice(BODIES)
    data = bytearray(post(body, path) * rng.randint(1, 3))
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


KINDS: tuple[Callable[[random.Random], bytes], ...] = (odd_fields, odd_body, odd_head, odd_bytes)


@pytest.fixture(scope="module")
def service() -> Iterator[ModelService]:
    with ModelService(any_text_bundle(), CONFIG) as service:
        yield service


@pytest.fixture(scope="module")
def url(service: ModelService) -> Iterator[str]:
    with background_server(service, limits=LIMITS) as url:
        yield url


def statuses(url: str, request: bytes, *, hang_up: bool) -> list[bytes]:
    """The status of each answer to some bytes, until the connection ends."""
    with connect(url) as connection:
        data = b""
        with suppress(ConnectionError):
            connection.sendall(request)
            if hang_up:
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65_536):
                data += piece
    return [part[:3] for part in data.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    ("count", "patient"), [(500, 0.01), pytest.param(10_000, 0.01, marks=pytest.mark.soak)]
)
def test_whatever_comes_is_answered_or_closed(
    url: str, service: ModelService, count: int, patient: float, caplog: pytest.LogCaptureFixture
) -> None:
    """`patient` of the clients wait for the server to close; the others say that they have said it all."""
    rng = random.Random(11)
    seen: dict[bytes, int] = {}
    for number in range(count):
        request = KINDS[number % len(KINDS)](rng)
        for status in statuses(url, request, hang_up=rng.random() >= patient):
            assert status[:1] in b"124" or status == UNKNOWN_CODING, request[:500]
            seen[status] = seen.get(status, 0) + 1
        if number % 100 == 0:
            assert exchange(url, get("/health")).status == 200
    assert seen.keys() >= {b"200", b"400", b"404", b"405", b"415", b"421"}
    assert not caplog.records
    stats = service.engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages, stats.violations) == (0, 0, stats.pages, 0)
    assert exchange(url, post(GENERATE)).status == 200
