"""From the engine to a client: the events of several requests as one sequence, and server-sent events."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from riftco.serving.engine import Engine, Event, GenerationRequest
from riftco.serving.http.answers import json_text, protective_headers, refusal_answer
from riftco.serving.http.request_policy import RefusedError

Observe = Callable[[GenerationRequest], Callable[[Event], None]]
"""Told of a request, gives what is to be told of its events, on the engine's thread."""
DONE = b"data: [DONE]\n\n"


class Bell:
    """Wakes tasks of an event loop from other threads: the loop once, for all that a step has news for."""

    def __init__(self) -> None:
        self._rung: deque[asyncio.Event] = deque()
        self._pending = False

    def ring(self, loop: asyncio.AbstractEventLoop, sleeper: asyncio.Event) -> None:
        """Set `sleeper` soon. Callable from any thread; nothing happens once the loop is closed."""
        self._rung.append(sleeper)
        if not self._pending and not loop.is_closed():
            self._pending = True
            loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._pending = False  # first: who rings from now on calls again
        while self._rung:
            self._rung.popleft().set()


class EventQueue:
    """The events of requests that were submitted together, as pairs (index of the request, event).

    All are submitted, or none: errors as `Engine.submit`. What has come of a choice while nobody looked comes
    as one event, so a server that falls behind sends larger pieces instead. `cancel` ends what has not ended.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[GenerationRequest], observe: Observe, bell: Bell
    ) -> None:
        self._engine, self._bell = engine, bell
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._arrived: deque[tuple[int, Event]] = deque()
        self._open = sum(request.choices for request in requests)
        self._ids: list[int] = []
        try:
            for index, request in enumerate(requests):
                self._ids.append(engine.submit(request, self._sink(index, observe(request))))
        except Exception:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End what has not ended; harmless when repeated."""
        for request_id in self._ids:
            self._engine.cancel(request_id)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while self._open:
            await self._news.wait()
            self._news.clear()
            arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
            for index, event in _merged(arrived):
                self._open -= event.finish is not None
                yield index, event

    def _sink(self, index: int, observe: Callable[[Event], None]) -> Callable[[Event], None]:
        def sink(event: Event) -> None:
            observe(event)
            self._arrived.append((index, event))
            self._bell.ring(self._loop, self._news)

        return sink


def _merged(arrived: Iterable[tuple[int, Event]]) -> Iterator[tuple[int, Event]]:
    """One event for each choice of each request."""
    found: dict[tuple[int, int], Event] = {}
    for index, event in arrived:
        before = found.get((index, event.choice))
        found[index, event.choice] = event if before is None else _joined(before, event)
    return ((index, event) for (index, _), event in found.items())


def _joined(first: Event, then: Event) -> Event:
    return Event(
        then.choice,
        first.token_ids + then.token_ids,
        first.text + then.text,
        first.logprobs + then.logprobs,
        then.finish,
        then.usage,
        then.error,
    )


class EventStream(Response):
    """Server-sent events, one `data:` line of JSON each, ended by `data: [DONE]`.

    The head waits for the first of them: until it is sent, a client that left is noticed at once. Where there
    is a RefusedError instead of a first one, the answer is that refusal.
    """

    def __init__(self, values: AsyncIterator[dict[str, Any]], headers: dict[str, str] | None = None) -> None:
        # X-Accel-Buffering: proxies pass each event on at once
        own = {"X-Accel-Buffering": "no"} | (headers or {})
        super().__init__(b"", 200, protective_headers() | own, "text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self._values = values

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        values = aiter(self._values)
        try:
            value = await anext(values, None)
        except RefusedError as error:
            await refusal_answer(error.refusal, scope["path"])(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while value is not None:
            data = b"data: " + json_text(value) + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
            value = await anext(values, None)
        await send({"type": "http.response.body", "body": DONE, "more_body": False})
