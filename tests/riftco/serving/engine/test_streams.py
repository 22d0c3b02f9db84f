"""A request's events as an iterator."""

import pytest

from riftco.serving.engine.request import GenerationRequest
from riftco.serving.engine.streams import generate
from tests.riftco.serving.engine.running import check_answers, running

REQUEST = GenerationRequest((1, 2, 3, 4, 5), 5, choices=2)
ENDLESS = GenerationRequest((1, 2, 3), 10**9)


def test_all_events_come_and_then_it_ends() -> None:
    with running() as (engine, _):
        check_answers(REQUEST, list(generate(engine, REQUEST)))


def test_errors_of_submitting_are_raised() -> None:
    with running() as (engine, _):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            next(generate(engine, GenerationRequest((99,))))
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            next(generate(engine, REQUEST))


def test_an_error_of_the_model_is_the_last_event() -> None:
    with running() as (engine, gate):
        gate.model.error = RuntimeError("out of memory")
        (event,) = generate(engine, ENDLESS)
        assert (event.finish, event.error) == ("error", "out of memory")


def test_leaving_early_cancels() -> None:
    with running(running=1) as (engine, _):
        events = generate(engine, ENDLESS)
        assert next(events).finish is None
        events.close()
        check_answers(REQUEST, list(generate(engine, REQUEST)))  # it has the place of the other
        assert engine.stats().requests_finished["cancelled"] == 1
