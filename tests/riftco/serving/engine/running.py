"""Engines with their thread over `FakeModel`, and listeners that wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event as Flag

from riftco.serving.engine.engine import Engine
from riftco.serving.engine.page_pool import PagePool
from riftco.serving.engine.request import Drawn, Event, GenerationRequest
from riftco.serving.engine.scheduler import Plan
from tests.riftco.serving.engine.fake_model import VOCABULARY, FakeModel, alone
from tests.riftco.serving.engine.invariants import WatchedScheduler

CAPACITY, PAGE = 16, 4
LONG = 20  # seconds after which a test gives up; none waits for so long


class Gate:
    """A runner that waits before each step until it is open, and counts the steps that began."""

    def __init__(self, model: FakeModel) -> None:
        self.model = model
        self.open, self.reached = Flag(), Flag()
        self.open.set()

    def run(self, plan: Plan) -> list[Drawn]:
        self.reached.set()
        assert self.open.wait(LONG)
        return self.model.run(plan)


class Listener:
    """Collects a request's events; `wait` until each of its choices has ended."""

    def __init__(self, choices: int = 1) -> None:
        self.events: list[Event] = []
        self._remaining, self._done = choices, Flag()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._remaining -= event.finish is not None
        if not self._remaining:
            self._done.set()

    def wait(self) -> list[Event]:
        assert self._done.wait(LONG), f"no end after {self.events}"
        return self.events

    @property
    def last(self) -> Event:
        return self.wait()[-1]


@contextmanager
def running(
    pages: int = 32, running: int = 4, waiting: int = 100, end_of_text_id: int | None = None
) -> Iterator[tuple[Engine, Gate]]:
    """A running engine, watched, and its gate, open. Afterwards nothing may be left in it."""
    scheduler = WatchedScheduler(
        PagePool(pages), PAGE, CAPACITY, running, step_tokens=32, end_of_text_id=end_of_text_id
    )
    gate = Gate(FakeModel(pages, PAGE))
    scheduler.watch(gate.model)
    engine = Engine(scheduler, gate, VOCABULARY, maximum_waiting=waiting)
    try:
        yield engine, gate
    finally:
        gate.open.set()
        engine.close()
    assert gate.model.fault is None
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.violations) == (0, 0, 0)
    assert stats.free_pages == stats.pages == pages


def ask(engine: Engine, request: GenerationRequest) -> Listener:
    listener = Listener(request.choices)
    engine.submit(request, listener)
    return listener


def check_answers(request: GenerationRequest, events: list[Event], end_of_text_id: int | None = None) -> None:
    """Every choice's events add up to its answer alone, and its last event, and no other, says so."""
    for choice in range(request.choices):
        own = [event for event in events if event.choice == choice]
        expected = alone(request, choice, CAPACITY, end_of_text_id)
        assert tuple(token for event in own for token in event.token_ids) == expected.token_ids
        assert "".join(event.text for event in own) == expected.text
        assert [event.finish for event in own] == [None] * (len(own) - 1) + [expected.finish]
        assert [event.usage is None for event in own] == [True] * (len(own) - 1) + [False]
