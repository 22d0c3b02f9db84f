"""Running the server: addresses, ports, and signals that end it cleanly."""

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server, serve
from riftco.serving.http.access import Access, ApiKey
from tests.riftco.serving.http.wire import exchange, post
from tests.riftco.serving.models import bundle
from tests.support import FIXTURES


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_and_nothing_else(kind: signal.Signals) -> None:
    seen: list[Any] = []
    previous = signal.signal(kind, lambda number, _: seen.append(number))

    def ask_then_signal(url: str) -> None:
        host = url.removeprefix("http://")
        seen.append(exchange(url, f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()).json["status"])
        os.kill(os.getpid(), kind)

    def ready(url: str) -> None:
        threads.submit(ask_then_signal, url)

    try:
        with ThreadPoolExecutor(1) as threads:
            serve(FIXTURES / "byte.rift", port=0, config=ServingConfig(backend="cpu"), ready=ready)
        assert seen == ["ok"]
        os.kill(os.getpid(), kind)
        assert seen == ["ok", kind], "the handler from before must be back"
    finally:
        signal.signal(kind, previous)


def test_several_models_are_served_by_name() -> None:
    seen: list[Any] = []

    def ask_then_signal(url: str) -> None:
        for name in ("byte", "bpe"):
            body = {"prompt": "the ", "max_new_tokens": 1, "model": name}
            seen.append(exchange(url, post(body)).json["artifact_id"])
        os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as threads:
        serve(
            {"byte": FIXTURES / "byte.rift", "bpe": bundle("bpe")},
            port=0,
            config=ServingConfig(backend="cpu"),
            ready=lambda url: threads.submit(ask_then_signal, url),
        )
    assert seen == [bundle("byte").artifact_id, bundle("bpe").artifact_id]


def test_a_signal_before_the_server_runs_is_not_lost() -> None:
    serve(
        FIXTURES / "byte.rift",
        port=0,
        config=ServingConfig(backend="cpu"),
        ready=lambda _: os.kill(os.getpid(), signal.SIGTERM),
    )


def test_a_port_in_use_is_an_error_before_the_bundle_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        serve("absent.rift", port=taken.getsockname()[1])


def test_a_first_bundle_without_room_is_an_error() -> None:
    with pytest.raises(ValueError, match="more than the 1 there are"):
        serve(bundle("byte"), port=0, memory_bytes=1)


@pytest.mark.parametrize(("port", "error"), [(-1, ValueError), (65_536, ValueError), (True, TypeError)])
def test_ports_are_integers_in_range(port: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="port must be"):
        serve("absent.rift", port=port)


@pytest.mark.parametrize(("host", "expected"), [("localhost", 421), ("0.0.0.0", 200)])
def test_only_a_loopback_bind_checks_the_host_header(host: str, expected: int) -> None:
    access = Access([ApiKey("somebody", b"")])
    with ModelService(bundle("byte")) as service, background_server(service, host=host, access=access) as url:
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert exchange(url, b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n").status == expected
        missing = exchange(url, b"GET /health HTTP/1.1\r\n\r\n")
        assert missing.status == (421 if expected == 421 else 400)


def test_ipv6_loopback() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with ModelService(bundle("byte")) as service, background_server(service, host="::1") as url:
        assert url.startswith("http://[::1]:")
        assert exchange(url, b"GET /health HTTP/1.1\r\nHost: [::1]\r\n\r\n").status == 200
