"""One streaming request: what is read from the stream, and what counts as a failure."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from riftco.bench_serve.client import Outcome, complete
from tests.riftco.bench_serve.fake_server import (
    DONE,
    STREAM,
    FakeServer,
    answers,
    chunk,
    event,
    serving,
    usage,
)


def outcome_of(fake: FakeServer) -> Outcome:
    async def ask() -> Outcome:
        async with httpx.AsyncClient(base_url=fake.url, trust_env=False, timeout=10) as client:
            return await complete(client, {"prompt": "p"})

    with serving(fake):
        return asyncio.run(ask())


def test_a_stream_gives_text_times_and_counts() -> None:
    pieces = chunk("Once"), chunk(" upon"), chunk("", "length"), usage(7, 2, 3), DONE
    outcome = outcome_of(FakeServer(answers(*pieces)))
    assert outcome.error is None
    assert outcome.text == "Once upon"
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.new_tokens) == (7, 3, 2)
    assert len(outcome.arrivals) == 2, "an event with nothing but the finish reason is no token"
    assert outcome.gaps == [outcome.arrivals[1] - outcome.arrivals[0]]
    assert 0 < outcome.arrivals[0] <= outcome.arrivals[1] <= outcome.seconds


def test_bytes_may_come_in_any_pieces_and_lines_end_in_any_way() -> None:
    text = "é\u2028𝄞"  # U+2028 ends a line elsewhere, not in an event stream
    value = {"choices": [{"text": text, "finish_reason": None}]}
    lines = b": a comment\r\nevent: x\r\n" + event(value).replace(b"\n", b"\r\n") + chunk("!") + DONE
    outcome = outcome_of(FakeServer(answers(*(lines[i : i + 1] for i in range(len(lines))))))
    assert (outcome.error, outcome.text) == (None, text + "!")


def test_data_may_span_lines() -> None:
    broken = json.dumps({"choices": [{"text": "x"}]}, indent=1).replace("\n", "\ndata: ")
    outcome = outcome_of(FakeServer(answers(f"data: {broken}\n\n".encode(), DONE)))
    assert (outcome.error, outcome.text) == (None, "x")


def test_without_usage_pieces_are_counted() -> None:
    outcome = outcome_of(FakeServer(answers(chunk("a"), chunk(""), chunk("c", "stop"), DONE)))
    assert (outcome.new_tokens, outcome.prompt_tokens, outcome.cached_tokens) == (3, 0, 0)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((429, "application/json", b'{"error": {"message": "too\\nmany"}}'), "HTTP 429: too many"),
        ((500, "text/plain", b"oh"), "HTTP 500: oh"),
        ((200, STREAM, chunk("a")), r"broke off before \[DONE\]"),
        ((200, STREAM, event({"error": {"message": "no memory"}})), "no memory"),
        ((200, STREAM, event({"error": "no memory"})), "no memory"),
        ((200, STREAM, b"data: {nonsense\n\n"), "not a stream of completions"),
        ((200, STREAM, event({"choices": [{"delta": {}}]})), "not a stream of completions"),
        ((200, STREAM, event([1])), "not a stream of completions"),
        ((200, "application/json", b"{}"), "text/event-stream"),
    ],
)
def test_anything_but_a_whole_stream_is_an_error(answer: tuple[int, str, bytes], error: str) -> None:
    def fail(_: Any) -> Any:
        return answer[0], answer[1], iter([answer[2]])

    outcome = outcome_of(FakeServer(fail))
    assert outcome.error is not None
    assert re.search(error, outcome.error), outcome.error


def test_a_server_that_is_gone_is_an_error() -> None:
    with serving(FakeServer(answers())) as fake:
        url = fake.url

    async def ask() -> Outcome:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            return await complete(client, {})

    assert asyncio.run(ask()).error
