"""Events on their way from the engine's thread to a client: nothing lost, nothing late, all or none."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

from riftco.serving.engine import Event, GenerationRequest, QueueFullError, Usage
from riftco.serving.http.events import Bell, EventQueue


class ScriptedEngine:
    """Takes so many requests, and says what a test tells it to."""

    def __init__(self, room: int = 10) -> None:
        self.room, self.sinks, self.cancelled = room, [], []  # type: ignore[var-annotated]

    def submit(self, request: GenerationRequest, sink: Callable[[Event], None]) -> int:
        if len(self.sinks) == self.room:
            raise QueueFullError(0, 1)
        self.sinks.append(sink)
        return len(self.sinks)

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)


def ignore(_: GenerationRequest) -> Callable[[Event], None]:
    return lambda _: None


def queue(engine: Any, *choices: int) -> EventQueue:
    requests = [GenerationRequest((1,), choices=count) for count in choices]
    return EventQueue(engine, requests, ignore, Bell())


def test_what_came_while_nobody_looked_comes_as_one_event() -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        events = queue(engine, 2, 1)
        usage = Usage(1, 0, 2)
        for index, event in [
            (0, Event(0, (1,), "a")),
            (1, Event(0, (5,), "x", (), "length", usage)),
            (0, Event(1, (3,), "c")),
            (0, Event(0, (2,), "b", (), "stop", usage)),
        ]:
            engine.sinks[index](event)
        found = events.__aiter__()
        assert [await anext(found) for _ in range(3)] == [
            (0, Event(0, (1, 2), "ab", (), "stop", usage)),
            (1, Event(0, (5,), "x", (), "length", usage)),
            (0, Event(1, (3,), "c")),
        ]
        engine.sinks[0](Event(1, finish="cancelled"))
        assert [pair async for pair in found] == [(0, Event(1, finish="cancelled"))]

    asyncio.run(run())


def test_a_request_that_is_refused_takes_those_before_it_along() -> None:
    async def run() -> None:
        engine = ScriptedEngine(room=2)
        with pytest.raises(QueueFullError):
            queue(engine, 1, 1, 1)
        assert engine.cancelled == [1, 2]

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(3))
def test_no_event_is_lost_between_threads(seed: int) -> None:
    """Several engines share a bell, and tell of tokens while their readers sleep, wake and fall behind."""
    tokens, rng = 400, random.Random(seed)

    def tell(sink: Callable[[Event], None]) -> None:
        for number in range(tokens):
            sink(Event(0, (number,), "", (), "length" if number == tokens - 1 else None))

    async def read(events: EventQueue) -> list[int]:
        found: list[int] = []
        async for _, event in events:
            found += event.token_ids
            if rng.random() < 0.1:
                await asyncio.sleep(0)
        return found

    async def run() -> None:
        bell, engine, requests = Bell(), ScriptedEngine(), [GenerationRequest((1,))]
        queues = [EventQueue(engine, requests, ignore, bell) for _ in range(4)]  # type: ignore[arg-type]
        threads = [Thread(target=tell, args=(sink,)) for sink in engine.sinks]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(30):
            found = await asyncio.gather(*map(read, queues))
        for thread in threads:
            thread.join()
        assert found == [list(range(tokens))] * 4

    asyncio.run(run())


class JustEmptied(deque):
    """Into which something is put just after it was found empty."""

    late: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        found = len(self) > 0
        if not found and self.late is not None:
            late, self.late = self.late, None
            late()
        return found


def test_who_rings_while_the_loop_wakes_is_heard() -> None:
    async def run() -> None:
        bell, loop = Bell(), asyncio.get_running_loop()
        first, second = asyncio.Event(), asyncio.Event()
        bell._rung = rung = JustEmptied()
        rung.late = lambda: bell.ring(loop, second)
        bell.ring(loop, first)
        async with asyncio.timeout(10):
            await first.wait()
            await second.wait()

    asyncio.run(run())


def test_an_engine_that_outlives_the_loop_is_not_disturbed() -> None:
    engine = ScriptedEngine()

    async def run() -> None:
        queue(engine, 1)

    asyncio.run(run())
    engine.sinks[0](Event(0, finish="cancelled"))
