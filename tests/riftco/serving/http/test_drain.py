"""SIGTERM: no request is taken any more, those in progress end well, or after a bound not at all."""

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import sleep
from typing import Any

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server, serve
from riftco.serving.engine import GenerationRequest, ModelRunner
from riftco.serving.http.limits import TimeLimits
from tests.riftco.serving.http.support import any_text_bundle, get
from tests.riftco.serving.http.wire import connect, exchange, post, read_answer, read_stream, wait_until
from tests.support import FIXTURES

CONFIG = ServingConfig(backend="cpu", maximum_new_tokens=40, stall_seconds=60.0)
ASK = {"prompt": "a", "max_new_tokens": 40, "stream": True}


class Gate:
    """How many steps engines may still take."""

    def __init__(self) -> None:
        self._left, self._changed = math.inf, threading.Condition()

    def allow(self, steps: float) -> None:
        with self._changed:
            self._left = steps
            self._changed.notify_all()

    def step(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._left > 0, 60)
            self._left -= 1


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, run = Gate(), ModelRunner.run

    def gated(self: ModelRunner, plan: Any) -> Any:
        gate.step()
        return run(self, plan)

    monkeypatch.setattr(ModelRunner, "run", gated)
    yield gate
    gate.allow(math.inf)


def serve_while(client: Any, limits: TimeLimits) -> Any:
    """Serve in this thread, as a process does, until the client in another has signalled; its result."""
    found: list[Future[Any]] = []
    with ThreadPoolExecutor(1) as threads:
        serve(
            any_text_bundle(64),
            port=0,
            config=CONFIG,
            limits=limits,
            ready=lambda url: found.append(threads.submit(client, url)),
        )
        return found[0].result(30)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stream_in_progress_ends_well_and_no_other_begins(gate: Gate) -> None:
    def client(url: str) -> list[Any]:
        with connect(url) as connection, connection.makefile("rb") as stream:
            gate.allow(2)
            connection.sendall(post(ASK))
            stream.peek(1)
            assert exchange(url, get("/ready")).status == 200
            terminate()
            assert wait_until(lambda: exchange(url, get("/ready")).status == 503)
            assert exchange(url, get("/ready")).json["detail"] == "the server is shutting down"
            assert exchange(url, get("/health")).status == 200
            refused = exchange(url, post(ASK))
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
            gate.allow(math.inf)
            return read_stream(stream)

    *news, last = serve_while(client, TimeLimits())
    assert sum(len(event["token_ids"]) for event in news) == 40
    assert last["finish_reason"] == "length"


def test_whoever_is_not_finished_in_time_is_told(gate: Gate) -> None:
    def client(url: str) -> tuple[list[Any], Any]:
        with (
            connect(url) as streaming,
            connect(url) as waiting,
            streaming.makefile("rb") as stream,
            waiting.makefile("rb") as whole,
        ):
            gate.allow(2)
            streaming.sendall(post(ASK))
            stream.peek(1)
            waiting.sendall(post(ASK | {"stream": False}))
            terminate()
            threading.Timer(0.5, gate.allow, [1]).start()
            return read_stream(stream), read_answer(whole)

    (*news, last), refused = serve_while(client, TimeLimits(drain=0.2))
    assert news
    assert "the server ended the request" in str(last)
    assert (refused.status, refused.headers["retry-after"]) == (503, "5")
    assert refused.json["detail"] == "the server ended the request"


def test_whoever_comes_to_its_engine_late_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ModelRunner.run

    def slow(self: ModelRunner, plan: Any) -> Any:
        sleep(0.1)
        return run(self, plan)

    monkeypatch.setattr(ModelRunner, "run", slow)

    def client(url: str) -> Any:
        with connect(url) as connection, connection.makefile("rb") as stream:
            request = post(ASK | {"stream": False, "max_new_tokens": 40})
            connection.sendall(request[:-5])
            sleep(0.2)
            terminate()
            sleep(0.8)
            connection.sendall(request[-5:])
            return read_answer(stream)

    refused = serve_while(client, TimeLimits(drain=0.5))
    assert (refused.status, refused.json["detail"]) == (503, "the server ended the request")


def test_the_callers_own_requests_go_on_after_its_server() -> None:
    ended = threading.Event()
    with ModelService(any_text_bundle(64), CONFIG) as service:
        with background_server(service):
            own = GenerationRequest((1,), 40)
            reasons: list[Any] = []

            def sink(event: Any) -> None:
                if event.finish is not None:
                    reasons.append(event.finish)
                    ended.set()

            service.engine.submit(own, sink)
        assert ended.wait(30)
    assert reasons == ["length"]


def test_what_hangs_is_cut_off(gate: Gate) -> None:
    def client(url: str) -> bytes:
        with connect(url) as connection, connection.makefile("rb") as stream:
            gate.allow(2)
            connection.sendall(post(ASK))
            stream.peek(1)
            terminate()
            data = stream.read()
            gate.allow(math.inf)
            return data

    data = serve_while(client, TimeLimits(drain=0.2))
    assert data.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in data


def test_an_engine_that_never_comes_back_does_not_keep_the_server_alive(gate: Gate) -> None:
    def client(url: str) -> str:
        with connect(url) as connection, connection.makefile("rb") as stream:
            gate.allow(2)
            connection.sendall(post(ASK))
            stream.peek(1)
            terminate()
            return "signalled"

    assert serve_while(client, TimeLimits(drain=0.2)) == "signalled"


@pytest.mark.soak
def test_the_process_exits_with_zero() -> None:
    code = f"""
from riftco.serving import serve
serve({str(FIXTURES / "bpe.rift")!r}, port=0, ready=lambda url: print(url, flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with connect(url) as connection, connection.makefile("rb") as stream:
            connection.sendall(post({"prompt": "the ", "max_new_tokens": 100, "stream": True}))
            stream.peek(1)
            process.terminate()
            assert read_stream(stream)[-1]["finish_reason"] == "length"
        assert process.wait(30) == 0
