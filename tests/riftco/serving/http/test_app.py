"""The HTTP service over real sockets: every recorded request, and what clients do that no recording has."""

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server
from riftco.serving.http.limits import TimeLimits
from riftco.serving.http.page import page
from tests.riftco.serving.http.support import held_engine
from tests.riftco.serving.http.wire import Answer, connect, exchange, post, read_answer
from tests.riftco.serving.models import bundle
from tests.support import fixture

RECORDED = fixture("http.json")
CONFIG = ServingConfig(backend="cpu", maximum_new_tokens=40, maximum_request_bytes=600)
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
# docs/compatibility.md: the deviations
OUTSIDE_VOCABULARY = "prompt byte outside byte vocabulary"
NOT_ALLOWED = 501
UNKNOWN_FIELDS = "unknown fields"  # one of which, `stream`, is known here


@pytest.fixture(scope="module")
def service() -> Iterator[ModelService]:
    with ModelService(bundle("byte"), CONFIG) as service:
        yield service


@pytest.fixture(scope="module")
def url(service: ModelService) -> Iterator[str]:
    with background_server(service) as url:
        yield url


def test_the_recording_was_made_with_these_settings() -> None:
    assert RECORDED["server"] == {"host": "127.0.0.1", "backend": "cpu"} | {
        name: getattr(CONFIG, name) for name in ("maximum_new_tokens", "maximum_request_bytes")
    }


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["label"])
def test_recorded_request(url: str, case: dict) -> None:
    request = case["request"].replace("PORT", url.rsplit(":", 1)[1]).encode("latin-1")
    answer = exchange(url, request, half_close=case["label"] == "body shorter than declared")
    status = int(case["status_line"].split()[1])
    recorded = {name.lower(): value for name, value in case["headers"] if name != "Connection"}
    expected = case.get("json")
    if recorded["content-type"].startswith("text/html"):
        recorded = recorded | {"content-security-policy": page()[1], "content-length": str(len(page()[0]))}
    if status == NOT_ALLOWED:
        assert (answer.status, answer.headers["allow"]) == (405, "GET")
        recorded = standard_headers()
    elif case["label"] == OUTSIDE_VOCABULARY:
        assert (answer.status, answer.json["error"]) == (400, "Bad Request")
        recorded.pop("content-length")
    elif expected is not None and "artifact_stage" in expected:
        assert answer.status == status
        assert expected.items() <= answer.json.items(), "health tells all it told, and more"
        recorded.pop("content-length")
    elif case["label"] == UNKNOWN_FIELDS:
        assert answer.json == expected | {"detail": "unknown request fields: b"}
        recorded.pop("content-length")
    else:
        assert answer.status == status
        assert expected is None or answer.json == expected
    assert recorded.items() <= answer.headers.items()
    assert answer.headers["content-length"].isdigit()
    assert "server" not in answer.headers


def standard_headers() -> dict[str, str]:
    """What every error has, taken from a recorded 404."""
    headers = next(case["headers"] for case in RECORDED["cases"] if case["label"] == "GET /nope")
    return {k.lower(): v for k, v in headers if k not in ("Connection", "Content-Length")}


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"prompt":"r","temperature":1e999}', "temperature must be finite"),
        (b'{"prompt":"r","temperature":-Infinity}', "temperature must be finite"),
        (b'{"prompt":"r","temperature":1' + b"0" * 400 + b"}", "temperature must be finite"),
        (b'{"prompt":"r","max_new_tokens":1e999}', "max_new_tokens must be an int"),
        (b'{"prompt":"r","max_new_tokens":NaN}', "max_new_tokens must be an int"),
        (b'{"prompt":"r","temperature":1,"top_k":NaN}', "top_k must be an integer"),
        (b'{"prompt":"r","temperature":1,"seed":[]}', "seed must be an integer"),
        (b'{"\\ud800":1}', "unknown request fields: \ud800"),
        (b'{"prompt":NaN}', "prompt must be a string"),
        (b"null", "request JSON must be an object"),
        (b"\x00", None),
        (b'{"prompt":"r"} x', None),
        (b"{'prompt':'r'}", None),
        ('{"prompt":"r"}'.encode("utf-16"), None),
        (b'{"prompt":"r\n"}', None),
        (b'{"prompt":"a\\u0000"}', None),
    ],
)
def test_nonsense_is_a_400_with_json(url: str, body: bytes, detail: str | None) -> None:
    answer = exchange(url, post(body))
    assert (answer.status, answer.json["error"]) == (400, "Bad Request")
    assert detail is None or answer.json["detail"] == detail
    assert standard_headers().items() <= answer.headers.items()


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"[" * 100_000, "request JSON is nested too deeply"),
        (b'{"prompt":' * 50_000, "request JSON is nested too deeply"),
        (b'{"prompt":"r","seed":' + b"9" * 5_000 + b"}", "Exceeds the limit"),
        (b'{"prompt":"r","temperature":1,"seed":' + b"9" * 4_000 + b"}", "seed must be at most"),
    ],
)
def test_large_nonsense_is_a_400_too(body: bytes, detail: str) -> None:
    service = ModelService(bundle("byte"), ServingConfig(backend="cpu"))
    with service, background_server(service) as url:
        answer = exchange(url, post(body))
        assert answer.status == 400
        assert detail in answer.json["detail"]
        assert exchange(url, post({"prompt": "the ", "max_new_tokens": 1})).status == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nBad Header: 1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 421),
        (b"GET /health HTTP/1.1\r\nHost: evil\r\nBad Header: 1\r\n\r\n", 421),
        (b"POST /nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\n\r\n", 404),
        (b"PUT /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\n\r\n", 405),
        (post(b"x").replace(b"Length: 1", b"Length: 1\r\nContent-Length: 2"), 400),
        (post(b"x").replace(b"Length: 1", b"Length: 1\r\nTransfer-Encoding: chunked"), 400),
        (HEALTH.replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"), 400),
        (HEALTH.replace(b"\r\n\r\n", b"\r\nX: " + b"a" * 300_000 + b"\r\n\r\n"), 431),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            200,
        ),
    ],
)
def test_malformed_requests_get_our_errors(url: str, request_bytes: bytes, status: int) -> None:
    answer = exchange(url, request_bytes)
    assert answer.status == status
    assert standard_headers().items() <= answer.headers.items()
    if status >= 400:
        assert answer.json.keys() == {"error", "detail"}
        assert answer.headers["connection"] == "close"
    assert exchange(url, HEALTH).status == 200


def test_a_connection_is_kept_for_the_next_request(url: str) -> None:
    with connect(url) as connection, connection.makefile("rb") as stream:
        for request, status in [
            (HEALTH, 200),
            (post({"prompt": "the ", "max_new_tokens": 2}), 200),
            (post({"prompt": ""}), 400),
            (HEALTH + HEALTH, 200),
            (b"", 200),
            (HEALTH.replace(b"health", b"nope"), 404),
        ]:
            connection.sendall(request)
            answer = read_answer(stream)
            assert answer.status == status
        assert answer.headers["connection"] == "close"
        with pytest.raises(EOFError):
            read_answer(stream)


def test_a_body_that_was_refused_is_not_the_next_request(url: str) -> None:
    smuggled = post({"prompt": "the ", "max_new_tokens": 1})
    wrapped = post(smuggled).replace(b"application/json", b"text/plain", 1)
    with connect(url) as connection, connection.makefile("rb") as stream:
        connection.sendall(wrapped + HEALTH)
        assert read_answer(stream).status == 415
        with pytest.raises(EOFError):
            read_answer(stream)


def test_an_upload_over_the_limit_is_answered_before_it_ends(url: str) -> None:
    with connect(url) as connection, connection.makefile("rb") as stream:
        connection.sendall(post(b"x").replace(b"Length: 1", b"Length: 50000000"))
        connection.sendall(b"x" * 2_000_000)
        answer = read_answer(stream)
    assert answer.status == 400
    assert answer.json["detail"] == "request body exceeds the 600-byte limit"


def test_a_half_closed_client_still_gets_its_answer_and_then_the_end(url: str) -> None:
    with connect(url) as connection, connection.makefile("rb") as stream:
        connection.sendall(post({"prompt": "the ", "max_new_tokens": 5}))
        connection.shutdown(socket.SHUT_WR)
        assert read_answer(stream).json["generated_text"] == "rean "
        connection.settimeout(3)  # less than the keep-alive of an idle connection
        assert stream.read() == b""


@pytest.mark.parametrize(
    ("method", "apart", "status"),
    [
        ("GET /health", True, 200),
        ("GET /health", False, 400),
        ("POST /v1/generate", True, 400),
        ("POST /v1/generate", False, 400),
    ],
)
def test_a_broken_chunk_ends_the_connection_quietly(
    url: str, method: str, apart: bool, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"{method} HTTP/1.1\r\nHost: localhost\r\n".encode()
    head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(url) as connection, connection.makefile("rb") as stream:
        connection.sendall(head if apart else head + b"zz\r\n")
        assert read_answer(stream).status == status
        if apart:
            connection.sendall(b"zz\r\n")
        with pytest.raises((EOFError, ConnectionResetError)):
            read_answer(stream)
    assert exchange(url, HEALTH).status == 200
    assert not caplog.records


def test_a_body_may_come_in_pieces_and_late_ones_are_a_408(service: ModelService) -> None:
    request = post({"prompt": "the ", "max_new_tokens": 1})
    limits = TimeLimits(body=0.3, body_silence=0.2)
    with (
        background_server(service, limits=limits) as url,
        connect(url) as connection,
        connection.makefile("rb") as stream,
    ):
        for byte in request:
            connection.sendall(bytes([byte]))
        assert read_answer(stream).status == 200
        connection.sendall(request[:-1])
        late = read_answer(stream)
    assert (late.status, late.json["error"]) == (408, "Request Timeout")


def test_health_answers_while_a_generation_runs(service: ModelService, url: str) -> None:
    with ThreadPoolExecutor(60) as threads, held_engine(service) as hold:
        request = post({"prompt": "the ", "max_new_tokens": 1})
        waiting = [threads.submit(exchange, url, request) for _ in range(60)]  # more than worker threads
        assert hold.reached.wait(10)
        assert [exchange(url, HEALTH).status for _ in range(5)] == [200] * 5
        assert not any(answer.done() for answer in waiting)
        hold.end.set()
        assert {answer.result().status for answer in waiting} == {200}


def test_a_client_that_leaves_disturbs_nobody(service: ModelService, url: str) -> None:
    with held_engine(service) as hold:
        for request in (post({"prompt": "the ", "max_new_tokens": 1}), post(b"{}" * 9)[:-3]):
            leaver = connect(url)
            leaver.sendall(request)
            assert hold.reached.wait(10)
            leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaver.close()  # with a reset
    assert exchange(url, post({"prompt": "the ", "max_new_tokens": 5})).json["generated_text"] == "rean "
    stats = service.engine.stats()
    assert (stats.running, stats.free_pages) == (0, stats.pages)


def test_concurrent_clients_get_their_own_answers(url: str) -> None:
    cases = fixture("byte.reference.json")["sampled"]

    def ask(case: dict) -> Answer:
        names = ("prompt", "max_new_tokens", "temperature", "top_k", "seed")
        return exchange(url, post({name: case[name] for name in names}))

    with ThreadPoolExecutor(4) as threads:
        for case, answer in zip(cases * 2, threads.map(ask, cases * 2), strict=True):
            assert answer.json["prompt"] == case["prompt"]
            assert answer.json["generated_token_ids"] == case["generated_token_ids"]


def test_an_unexpected_failure_is_a_500_that_tells_nothing(
    service: ModelService, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(service.engine._runner, "run", broken)
    answer = exchange(url, post({"prompt": "the "}))
    assert answer.status == 500
    assert answer.json == {"error": "Internal Server Error", "detail": "generation failed"}
    assert "secret" in caplog.text
