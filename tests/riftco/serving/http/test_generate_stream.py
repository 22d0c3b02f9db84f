"""`/v1/generate` as a stream, and its fields beyond the original's."""

import json
import socket
from collections.abc import Iterator
from threading import Event
from time import sleep
from typing import Any

import pytest

from riftco.config import ServingConfig
from riftco.serving import ModelService, background_server
from tests.riftco.serving.http.support import any_text_bundle, fail_from_step, held_engine
from tests.riftco.serving.http.wire import connect, exchange, post, read_answer, read_stream, wait_until
from tests.riftco.serving.models import bundle

CONFIG = ServingConfig(backend="cpu", maximum_new_tokens=200)
ASK = {"prompt": "Once", "max_new_tokens": 12, "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def service() -> Iterator[ModelService]:
    with ModelService(any_text_bundle(), CONFIG) as service:
        yield service


@pytest.fixture(scope="module")
def url(service: ModelService) -> Iterator[str]:
    with background_server(service) as url:
        yield url


def streamed(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with connect(url) as connection, connection.makefile("rb") as stream:
        connection.sendall(post(body | {"stream": True}))
        return read_stream(stream)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0}, {"max_new_tokens": 150}, {"max_new_tokens": 0}])
def test_a_stream_says_what_the_whole_answer_says(url: str, changes: dict[str, Any]) -> None:
    whole = exchange(url, post(ASK | changes)).json
    *news, last = streamed(url, ASK | changes)
    assert "".join(event["text"] for event in news) == whole["generated_text"]
    assert [i for event in news for i in event["token_ids"]] == whole["generated_token_ids"]
    usage = last["usage"]
    assert (last["finish_reason"], usage["prompt_tokens"]) == ("length", 4)
    assert usage["generated_tokens"] == len(whole["generated_token_ids"]) == (ASK | changes)["max_new_tokens"]


def test_a_stream_of_a_recorded_model_slides_as_the_original() -> None:
    with (
        ModelService(bundle("byte"), ServingConfig(backend="cpu")) as service,
        background_server(service) as url,
    ):
        whole = exchange(url, post({"prompt": "the "})).json
        assert len(whole["token_ids"]) > service.maximum_context
        news = streamed(url, {"prompt": "the "})[:-1]
    assert "".join(event["text"] for event in news) == whole["generated_text"]


def test_log_probabilities_come_with_each_token_s_text(url: str) -> None:
    *news, _ = streamed(url, ASK | {"logprobs": 3})
    for event in news:
        assert [one["token_id"] for one in event["logprobs"]] == event["token_ids"]
        assert event["tokens"] == [bytes([i]).decode(errors="replace") for i in event["token_ids"]]
        for one in event["logprobs"]:
            assert len(one["top"]) == 3
            assert one["logprob"] <= max(logprob for _, logprob, _ in one["top"]) <= 0
            assert all(text == bytes([i]).decode(errors="replace") for i, _, text in one["top"])


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_a_stop_string(url: str, stream: bool) -> None:
    whole = exchange(url, post(ASK)).json["generated_text"]
    stop = next(whole[i] for i in range(3, len(whole)) if whole[i] != "\ufffd")
    expected = whole[: whole.index(stop)]
    for given in (stop, ["never", stop]):
        if stream:
            *news, last = streamed(url, ASK | {"stop": given})
            assert "".join(event["text"] for event in news) == expected
            assert last["finish_reason"] == "stop"
        else:
            answer = exchange(url, post(ASK | {"stop": given})).json
            assert (answer["generated_text"], answer["text"]) == (expected, "Once" + expected)


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"stream": 1}, "stream must be true or false"),
        ({"stream": None}, "stream must be true or false"),
        ({"logprobs": 3}, "logprobs needs a stream"),
        ({"logprobs": 21, "stream": True}, "top_logprobs must be at most 20"),
        ({"logprobs": True, "stream": True}, "top_logprobs must be an integer"),
        ({"stop": 1}, "stop must be a string or a list of strings"),
        ({"stop": ["a", None]}, "stop must be a string or a list of strings"),
        ({"stop": [""]}, "stop must hold non-empty strings"),
        ({"stop": ["a"] * 17}, "stop may hold 16 strings"),
        ({"stop": "a" * 1_001}, "of 1000 characters"),
        ({"prompt": "", "stream": True}, "at least one token"),
    ],
)
def test_wrong_fields_are_named_before_a_stream(url: str, changes: dict[str, Any], detail: str) -> None:
    answer = exchange(url, post(ASK | changes))
    assert (answer.status, answer.json["error"]) == (400, "Bad Request")
    assert detail in answer.json["detail"]


def test_a_failure_is_the_last_event_of_a_stream(
    url: str, service: ModelService, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun = Event()  # else the failure may come with the first tokens, and be a status
    fail_from_step(2, service, monkeypatch, once=has_begun)
    with connect(url) as connection, connection.makefile("rb") as stream:
        connection.sendall(post(ASK | {"stream": True}))
        assert stream.peek(1)
        has_begun.set()
        *news, last = read_stream(stream)
    assert sum(len(event["token_ids"]) for event in news) == 2
    assert (last["finish_reason"], last["detail"]) == ("error", "generation failed")
    assert last["usage"]["generated_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_anything_else_is_a_status(
    url: str, service: ModelService, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    fail_from_step(0, service, monkeypatch)
    answer = exchange(url, post(ASK | {"stream": stream}))
    assert (answer.status, answer.json["detail"]) == (500, "generation failed")


def test_a_request_past_its_deadline_is_a_504_or_a_last_event() -> None:
    config = CONFIG.model_copy(update={"request_seconds": 0.2})
    with ModelService(any_text_bundle(), config) as service, background_server(service) as url:
        for stream in (False, True):
            with (
                held_engine(service) as hold,
                connect(url) as connection,
                connection.makefile("rb") as answer,
            ):
                connection.sendall(post(ASK | {"stream": stream}))
                assert hold.reached.wait(10)
                sleep(0.2)
                hold.end.set()
                if stream:  # of which the step that was held is the beginning
                    last = read_stream(answer)[-1]
                    assert (last["finish_reason"], last["error"]) == ("timeout", "Gateway Timeout")
                else:
                    refused = read_answer(answer)
                    assert (refused.status, refused.headers["x-should-retry"]) == (504, "false")


def cancelled(service: ModelService) -> int:
    return service.engine.stats().requests_finished.get("cancelled", 0)


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_generation(
    url: str, service: ModelService, how: str, stream: bool
) -> None:
    before = cancelled(service)
    with held_engine(service) as hold:
        leaver = connect(url)
        leaver.sendall(post(ASK | {"max_new_tokens": 200, "stream": stream}))
        assert hold.reached.wait(10)
        if how == "reset":
            leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        leaver.close()
        # nothing has been written, and still the server finds out
        assert wait_until(lambda: service.engine._commands.qsize() > 0)
    assert wait_until(lambda: cancelled(service) == before + 1)
    stats = service.engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)
    assert stats.violations == 0


def test_a_client_that_has_said_everything_still_gets_its_answer(url: str, service: ModelService) -> None:
    with held_engine(service) as hold, connect(url) as connection, connection.makefile("rb") as stream:
        connection.sendall(post(ASK))
        connection.shutdown(socket.SHUT_WR)
        assert hold.reached.wait(10)
        assert stream.readline() == b"HTTP/1.1 100 Continue\r\n"  # asked whether it is still there
        assert stream.readline() == b"\r\n"
        hold.end.set()
        assert len(read_answer(stream).json["generated_token_ids"]) == 12


def test_an_old_client_is_never_sent_what_it_does_not_know(url: str, service: ModelService) -> None:
    with held_engine(service) as hold, connect(url) as connection, connection.makefile("rb") as stream:
        connection.sendall(post(ASK).replace(b"HTTP/1.1", b"HTTP/1.0"))
        connection.shutdown(socket.SHUT_WR)
        assert hold.reached.wait(10)
        hold.end.set()
        assert stream.readline() == b"HTTP/1.1 200 OK\r\n"


def test_events_are_lines_of_json(url: str) -> None:
    with connect(url) as connection, connection.makefile("rb") as stream:
        connection.sendall(post(ASK | {"stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = stream.read().partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream; charset=utf-8" in head.lower()
    events = body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(json.loads(event.removeprefix(b"data: ")) for event in events[:-2])
