"""A request's events as an iterator, for threads; `riftco.serving.http.events` does the same for asyncio."""

from collections.abc import Iterator
from queue import SimpleQueue

from riftco.serving.engine.engine import Engine
from riftco.serving.engine.request import Event, GenerationRequest


def generate(engine: Engine, request: GenerationRequest) -> Iterator[Event]:
    """Submit a request and give its events, the last of each choice included.

    Leaving it early cancels the request. Errors as `Engine.submit`, at the first event.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    request_id = engine.submit(request, events.put)
    try:
        remaining = request.choices
        while remaining:
            event = events.get()
            remaining -= event.finish is not None
            yield event
    finally:
        engine.cancel(request_id)
