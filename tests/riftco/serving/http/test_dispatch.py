"""Borrowing models and working in threads: nothing is lost, nobody waits for another's model."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server
from riftco.serving.http import answers
from riftco.serving.http.shelf import Shelf
from tests.riftco.serving.http.support import Hold, any_text_bundle, leave
from tests.riftco.serving.http.wire import connect, exchange, post, wait_until

CONFIG = ServingConfig(backend="cpu", maximum_running=2)
BUNDLES = {name: any_text_bundle(32, seed) for seed, name in enumerate("ab")}
WORKER_THREADS = 40


def ask(model: str) -> bytes:
    return post({"prompt": "x", "max_new_tokens": 1, "model": model})


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    """The first of two models is loaded."""
    with Shelf(BUNDLES, CONFIG) as shelf:
        shelf.acquire("a")
        shelf.release("a")
        yield shelf


@pytest.fixture
def url(shelf: Shelf) -> Iterator[str]:
    with background_server(shelf) as url:
        yield url


@pytest.fixture
def held_load(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """Models take until `end` to load."""
    hold = Hold()

    def load(*args: Any) -> ModelService:
        hold.reached.set()
        assert hold.end.wait(30)
        return ModelService(*args)

    monkeypatch.setattr("riftco.serving.http.shelf.ModelService", load)
    yield hold
    hold.end.set()


def test_a_client_that_leaves_while_its_model_loads_keeps_nothing(
    url: str, shelf: Shelf, held_load: Hold
) -> None:
    leaver = connect(url)
    leaver.sendall(ask("b"))
    assert held_load.reached.wait(10)
    leave(leaver)
    sleep(0.2)  # for the server to notice, and to let go of what it has of the request
    held_load.end.set()
    assert wait_until(lambda: shelf.loaded("b") is not None)
    assert wait_until(lambda: shelf._entries["b"].uses == 0, 2)


def test_those_who_wait_for_a_model_leave_the_threads_to_others(url: str, held_load: Hold) -> None:
    with ExitStack() as connections, ThreadPoolExecutor(1) as threads:
        for _ in range(WORKER_THREADS + 5):
            connections.enter_context(connect(url)).sendall(ask("b"))
        assert held_load.reached.wait(10)
        answer = threads.submit(exchange, url, ask("a"))
        try:
            assert answer.result(5).status == 200
        finally:
            held_load.end.set()


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/completions"])
@pytest.mark.parametrize("content", [None, b"damaged"])
def test_a_bundle_that_cannot_be_loaded_is_the_server_s_fault_and_secret(
    tmp_path: Path, content: bytes | None, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "secret.rift"
    if content is not None:
        file.write_bytes(content)
    with Shelf({"a": BUNDLES["a"], "bad": file}, CONFIG) as shelf, background_server(shelf) as url:
        answer = exchange(url, post({"prompt": "x", "model": "bad"}, path))
    assert answer.status == 503
    assert b"the model 'bad' could not be loaded" in answer.body
    assert b"secret" not in answer.body
    assert "secret.rift" in caplog.text
    if path == "/v1/completions":
        assert answer.json["error"]["code"] == "model_not_loaded"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/generate", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_answers_are_not_written_by_the_event_loop(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names, encode = [], answers.json_text

    def recorded(value: Any) -> bytes:
        names.append(threading.current_thread().name)
        return encode(value)

    monkeypatch.setattr(answers, "json_text", recorded)
    with ModelService(any_text_bundle(), CONFIG) as service, background_server(service) as url:
        assert exchange(url, post({"model": "riftco"} | body, path)).status == 200
    assert len(names) == 1
    assert names[0] != "riftco-serving"
