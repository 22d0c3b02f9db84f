"""The policy over request heads: loopback names, the order of checks, lenient reading of refused bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from riftco.serving.http.request_policy import RequestHead, RequestPolicy, is_loopback, names_loopback

ROUTES = {"/": "GET", "/health": "GET", "/v1/generate": "POST"}
LOCAL = RequestPolicy(ROUTES, requires_loopback_host=True, maximum_request_bytes=600)
PUBLIC = RequestPolicy(ROUTES, requires_loopback_host=False, maximum_request_bytes=600)
GOOD = {"host": "localhost", "content-type": "application/json", "content-length": "2"}


def head(method: str = "POST", target: str = "/v1/generate", **changes: str | None) -> RequestHead:
    """A good generation request, with header changes by name (underscores for hyphens, None removes)."""
    headers = GOOD | {name.replace("_", "-"): value for name, value in changes.items()}
    return RequestHead(method, target, tuple((k, v) for k, v in headers.items() if v is not None))


def status(request: RequestHead, policy: RequestPolicy = LOCAL) -> int | None:
    refusal = policy.refusal(request)
    return refusal and int(refusal.status)


@pytest.mark.parametrize(
    "authority",
    [
        "localhost",
        "LocalHost.",
        "localhost:",
        "localhost:0",
        "127.0.0.1:65535",
        "127.255.1.2",
        "[::1]",
        "[::1]:8",
    ],
)
def test_loopback_names(authority: str) -> None:
    assert names_loopback(authority)


@pytest.mark.parametrize(
    "authority",
    [
        *("", " ", ":80", "::1", "[::1", "[127.0.0.1]", "[::2]", "[::ffff:127.0.0.1]", "[::1]x", "127.1"),
        *("0.0.0.0", "10.0.0.1", "128.0.0.1", "localhost..", "localhost.evil", "127.0.0.1.evil.example"),
        *("localhost:65536", "localhost:80:80", "localhost:-1", "user@localhost", "localhost/", "localhost#"),
        *(
            "localhost,evil",
            "local host",
            "localhost\x00",
            "2130706433",
            "0x7f.0.0.1",
            "\u0661\u0662\u0667.0.0.1",
        ),
    ],
)
def test_other_names(authority: str) -> None:
    assert not names_loopback(authority)


@given(st.text(max_size=30))
def test_any_host_header_is_judged_without_failing(authority: str) -> None:
    assert names_loopback(authority) in (True, False)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("box", False),
    ],
)
def test_only_loopback_binds_ask_for_loopback_hosts(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_order_of_checks() -> None:
    worst = {"content_type": "text/plain", "content_length": "0"}
    assert status(head("PUT", "/nope", host="evil", **worst)) == 421
    assert status(head("PUT", "/nope", **worst)) == 404
    assert status(head("PUT", "/health", **worst)) == 405
    assert status(head("GET", "/v1/generate", **worst)) == 404
    assert status(head("POST", "/health", **worst)) == 404
    assert status(head(**worst)) == 415
    assert status(head(content_length="0")) == 400
    assert status(head()) is None
    assert status(head("GET", "/health", content_type=None, content_length=None)) is None


def test_a_public_bind_serves_any_host() -> None:
    assert status(head(host="evil"), PUBLIC) is None
    assert status(head(host=None), PUBLIC) is None
    twice = RequestHead("GET", "/health", (("host", "localhost"), ("host", "localhost")))
    assert status(twice, PUBLIC) is None
    assert status(twice, LOCAL) == 421


def test_a_405_says_what_would_do() -> None:
    refusal = LOCAL.refusal(head("DELETE", "/v1/generate"))
    assert refusal is not None
    assert refusal.allow == "POST"


@pytest.mark.parametrize(
    ("length", "detail"),
    [
        (None, "Content-Length is required"),
        *(
            (text, "Content-Length must be an integer")
            for text in ("", "abc", "0x10", "1.0", "1_0", "- 1", "\u0661")
        ),
        *(
            (text, "request body must not be empty")
            for text in ("0", "00", "+0", "-0", "-1", "-" + "9" * 5000)
        ),
        *((text, "request body exceeds the 600-byte limit") for text in ("601", "9" * 20, "9" * 5000)),
    ],
)
def test_lengths_that_are_refused(length: str | None, detail: str) -> None:
    refusal = LOCAL.refusal(head(content_length=length))
    assert refusal is not None
    assert (int(refusal.status), refusal.detail) == (400, detail)


@pytest.mark.parametrize("length", ["1", "600", "+5", "0600"])
def test_lengths_that_are_accepted(length: str) -> None:
    assert status(head(content_length=length)) is None


@pytest.mark.parametrize("target", ["/health", "//health", "///health"])
def test_leading_slashes_collapse(target: str) -> None:
    assert status(head("GET", target)) is None


@pytest.mark.parametrize(
    "target", ["/health/", "/health?x=1", "/%68ealth", "health", "*", "http://localhost/health", "/HEALTH"]
)
def test_other_targets_are_other_paths(target: str) -> None:
    assert status(head("GET", target)) == 404


def test_two_lengths_are_never_accepted() -> None:
    refusal = LOCAL.refusal(head("GET", "/health", transfer_encoding="chunked"))
    assert refusal is not None
    assert refusal.detail == "Content-Length and Transfer-Encoding must not be combined"


def test_refused_bytes_are_read_as_far_as_they_go() -> None:
    data = b"GET /health HTTP/1.1\r\nHOST :  localhost \r\nbroken\r\nX: a:b\n\r\nHost: evil\r\n"
    read = RequestHead.from_refused_bytes(data)
    assert read == RequestHead("GET", "/health", (("host", "localhost"), ("x", "a:b")))
    assert RequestHead.from_refused_bytes(b"\x16\x03\x01") is None


@given(st.binary(max_size=200))
def test_any_refused_bytes_are_judged_without_failing(data: bytes) -> None:
    read = RequestHead.from_refused_bytes(data)
    if read is not None:
        assert status(read) in (None, 400, 404, 405, 415, 421)
