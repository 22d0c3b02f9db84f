"""The engine with its thread: events, ends of all kinds, refusals, and that it lives on whatever comes."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from threading import Thread

import pytest

from riftco.serving.engine.engine import Engine, QueueFullError
from riftco.serving.engine.page_pool import PagePool
from riftco.serving.engine.request import Event, GenerationRequest, SamplingParams, Usage
from riftco.serving.engine.scheduler import Scheduler
from tests.riftco.serving.engine.fake_model import VOCABULARY, FakeModel, alone
from tests.riftco.serving.engine.running import CAPACITY, LONG, PAGE, Listener, ask, check_answers, running

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)
REQUEST = GenerationRequest(PROMPT, 6)
DRAWN = SamplingParams(temperature=1.0, seed=3)


def until(holds: Callable[[], bool]) -> None:
    """Wait for what must come."""
    limit = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.002)


def test_events_of_a_request_in_order() -> None:
    with running() as (engine, _):
        events = ask(engine, REQUEST).wait()
        check_answers(REQUEST, events)
        assert [len(event.token_ids) for event in events] == [1] * 6
        assert events[-1].usage == Usage(prompt_tokens=8, cached_tokens=0, generated_tokens=6)
        assert ask(engine, REQUEST).last.usage == Usage(8, 7, 6)


def test_a_hundred_requests_from_several_threads_get_what_each_gets_alone() -> None:
    random, asked = Random(5), []

    def request() -> GenerationRequest:
        return GenerationRequest(
            tuple(random.choices((1, 2, 3, 4), k=random.randint(1, 20))),
            random.randint(1, 12),
            SamplingParams(temperature=random.choice((0.0, 1.0)), seed=random.randint(0, 9)),
            choices=random.choice((1, 1, 2, 3)),
            stop=random.choice(((), ("ab",), ("b", "é"))),
            overflow=random.choice(("slide", "half")),
            salt=random.choice((b"", b"x")),
        )

    with running(pages=12, waiting=300, end_of_text_id=0) as (engine, _):

        def submit(requests: list[GenerationRequest]) -> None:
            asked.extend([(request, ask(engine, request)) for request in requests])

        threads = [Thread(target=submit, args=([request() for _ in range(25)],)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one, listener in asked:
            check_answers(one, listener.wait(), end_of_text_id=0)
        stats = engine.stats()
        assert len(asked) == 100
        assert sum(stats.requests_finished.values()) == sum(one.choices for one, _ in asked)
        assert stats.prompt_tokens == sum(len(one.prompt_ids) * one.choices for one, _ in asked)
        usages = [event.usage for _, listener in asked for event in listener.events if event.usage]
        assert stats.cached_tokens == sum(usage.cached_tokens for usage in usages)
        assert stats.generated_tokens == sum(usage.generated_tokens for usage in usages)
        assert stats.preemptions > 0


def test_log_probabilities_come_with_their_tokens_where_they_are_asked_for() -> None:
    request = GenerationRequest(PROMPT, 3, top_logprobs=2)
    with running() as (engine, _):
        for event in ask(engine, request).wait():
            assert [one.token_id for one in event.logprobs] == list(event.token_ids)
            assert [len(one.top) for one in event.logprobs] == [2]
        assert all(event.logprobs == () for event in ask(engine, REQUEST).wait())


def test_the_end_of_text_is_no_token_of_the_answer() -> None:
    end = alone(REQUEST, 0, CAPACITY, None).token_ids[2]
    with running(end_of_text_id=end) as (engine, _):
        events = ask(engine, REQUEST).wait()
    check_answers(REQUEST, events, end_of_text_id=end)
    assert (events[-1].finish, events[-1].token_ids) == ("stop", ())
    assert events[-1].usage == Usage(8, 0, len(alone(REQUEST, 0, CAPACITY, end).token_ids))


def test_a_stop_string_completed_by_the_last_token_is_a_stop() -> None:
    whole = GenerationRequest(PROMPT, 9, DRAWN)
    tokens = alone(whole, 0, CAPACITY, None).token_ids
    length = next(n for n, token in enumerate(tokens, 1) if VOCABULARY[token].isalnum() and n > 1)
    stop = VOCABULARY[tokens[length - 1]].decode(errors="replace")
    request = GenerationRequest(PROMPT, length, DRAWN, stop=(stop,))
    with running() as (engine, _):
        events = ask(engine, request).wait()
    check_answers(request, events)
    assert events[-1].finish == "stop"


@pytest.mark.parametrize("token", range(1, 12))
def test_cancelled_after_any_token_and_asked_again(token: int) -> None:
    """Of a request that slides: no more comes, its pages are free with its last event, others go on."""
    request = GenerationRequest(PROMPT, 12, DRAWN, choices=2)
    with running() as (engine, _):
        other = ask(engine, GenerationRequest((9,) * 5, 30, DRAWN))
        free: list[int] = []

        def sink(event: Event) -> None:
            listener(event)
            if sum(len(event.token_ids) for event in listener.events if event.choice == 0) == token:
                engine.cancel(request_id)
            if event.finish is not None:
                free.append(engine.stats().running)

        listener = Listener(2)
        request_id = engine.submit(request, sink)
        events = listener.wait()
        assert Counter(event.finish for event in events if event.finish) == {"cancelled": 2}
        given = [t for event in events if event.choice == 0 for t in event.token_ids]
        assert tuple(given) == alone(request, 0, CAPACITY, None).token_ids[:token]
        assert free[-1] <= 1
        check_answers(request, ask(engine, request).wait())
        check_answers(GenerationRequest((9,) * 5, 30, DRAWN), other.wait())


def test_cancelling_touches_that_request_alone() -> None:
    with running(running=1) as (engine, gate):
        gate.open.clear()
        first, third = ask(engine, REQUEST), Listener()
        queued = Listener()
        queued_id = engine.submit(REQUEST, queued)
        engine.submit(REQUEST, third)
        engine.cancel(queued_id)
        engine.cancel(queued_id)
        engine.cancel(987654)
        gate.open.set()
        assert queued.last == Event(0, finish="cancelled", usage=Usage(8, 0, 0))
        check_answers(REQUEST, first.wait())
        check_answers(REQUEST, third.wait())
        engine.cancel(queued_id)
        check_answers(REQUEST, ask(engine, REQUEST).wait())
        assert len(queued.events) == 1


def test_a_deadline_ends_what_runs_and_what_waits() -> None:
    with running(running=1) as (engine, gate):
        gate.open.clear()
        late = [ask(engine, GenerationRequest(PROMPT, 9, seconds=0.01, choices=2)) for _ in range(2)]
        in_time = ask(engine, GenerationRequest(PROMPT, 9, seconds=1000.0))
        time.sleep(0.02)
        gate.open.set()
        for listener in late:
            assert {event.finish for event in listener.wait() if event.usage} == {"timeout"}
        assert in_time.last.finish == "length"


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    with running(running=2, waiting=3) as (engine, gate):
        gate.open.clear()
        listeners = [ask(engine, REQUEST) for _ in range(4)]
        with pytest.raises(QueueFullError, match="2 requests are waiting already") as refused:
            ask(engine, GenerationRequest(PROMPT, choices=2))
        assert refused.value.retry_after_seconds >= 1
        listeners.append(ask(engine, REQUEST))
        with pytest.raises(QueueFullError):
            ask(engine, REQUEST)
        gate.open.set()
        for listener in listeners:
            check_answers(REQUEST, listener.wait())
        everything = GenerationRequest(PROMPT, 2, choices=5)
        check_answers(everything, ask(engine, everything).wait())


def test_prompts_that_wait_are_bounded_by_their_tokens_too() -> None:
    with running(running=2, waiting=3) as (engine, gate):
        gate.open.clear()
        huge = GenerationRequest((1,) * (6 * CAPACITY), 2)
        alone = ask(engine, huge)
        with pytest.raises(QueueFullError):
            ask(engine, REQUEST)
        gate.open.set()
        assert alone.wait()[-1].usage == Usage(6 * CAPACITY, 0, 2)
        gate.open.clear()
        several = [ask(engine, GenerationRequest((2,) * (2 * CAPACITY), 1)) for _ in range(2)]
        with pytest.raises(QueueFullError):
            ask(engine, GenerationRequest((3,) * (CAPACITY + 1), 1))
        several.append(ask(engine, GenerationRequest((3,) * CAPACITY, 1)))
        gate.open.set()
        for listener in several:
            listener.wait()
        with pytest.raises(
            ValueError, match="2 choices of a prompt of 48 tokens are more than the 80 tokens"
        ):
            ask(engine, GenerationRequest((1,) * (3 * CAPACITY), 2, choices=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_ids": (1, len(VOCABULARY))}, "token id 16 is outside the vocabulary of 16"),
        ({"prompt_ids": (-1,)}, "token id -1 is outside"),
        ({"prompt_ids": (10**400,)}, "is outside the vocabulary"),
        ({"sampling": SamplingParams(top_k=17)}, "top_k must not exceed the vocabulary of 16"),
        (
            {"overflow": "stop", "prompt_ids": (1,) * 16},
            "the prompt has 16 tokens and the context 16; shorten it",
        ),
        ({"choices": 105}, "choices must be at most 104"),
        ({"choices": 10**12}, "choices must be at most 104"),
    ],
)
def test_what_can_never_be_served_is_refused_and_the_engine_lives(options: dict, message: str) -> None:
    with running() as (engine, _):
        with pytest.raises(ValueError, match=message):
            ask(engine, GenerationRequest(**{"prompt_ids": PROMPT, **options}))
        check_answers(REQUEST, ask(engine, REQUEST).wait())
        longest = GenerationRequest((1,) * 15, 5, overflow="stop")
        check_answers(longest, ask(engine, longest).wait())


def test_a_step_that_fails_ends_its_requests_and_no_others() -> None:
    with running(running=2) as (engine, gate):
        gate.open.clear()
        doomed = [ask(engine, REQUEST), ask(engine, REQUEST)]
        gate.reached.wait(LONG)
        spared = ask(engine, GenerationRequest(PROMPT, 5, DRAWN))
        gate.model.error = ValueError("logits are not finite")
        gate.open.set()
        assert doomed[0].last.error == "logits are not finite"
        assert doomed[0].last.finish == "error"
        check_answers(GenerationRequest(PROMPT, 5, DRAWN), spared.wait())
        doomed[1].wait()
        check_answers(REQUEST, ask(engine, REQUEST).wait())
        assert engine.stats().requests_finished["error"] in (1, 2)


def test_an_error_without_words_has_its_name() -> None:
    with running() as (engine, gate):
        gate.model.error = KeyError()
        assert ask(engine, REQUEST).last.error == "KeyError"


def test_a_listener_that_fails_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Event) -> None:
        raise ZeroDivisionError

    with running() as (engine, gate), caplog.at_level(logging.CRITICAL, "riftco.serving"):
        gate.open.clear()
        engine.submit(REQUEST, broken)
        listener = ask(engine, REQUEST)
        gate.open.set()
        check_answers(REQUEST, listener.wait())
        until(lambda: engine.stats().requests_finished == {"length": 2})


def test_closing_cancels_what_is_there_and_refuses_what_comes() -> None:
    with running(running=1) as (engine, gate):
        gate.open.clear()
        listeners = [ask(engine, GenerationRequest(PROMPT, 1000, choices=2)) for _ in range(3)]
        gate.reached.wait(LONG)
        closers = [Thread(target=engine.close) for _ in range(3)]
        for closer in closers:
            closer.start()
        until(lambda: engine.closed)
        gate.open.set()
        for closer in closers:
            closer.join(LONG)
        for listener in listeners:
            assert [e.finish for e in listener.wait() if e.finish] == ["cancelled"] * 2
        with pytest.raises(RuntimeError, match="the engine is closed"):
            engine.submit(REQUEST, print)
        engine.cancel(1)
        engine.close(drain=True)


def test_draining_finishes_what_is_there() -> None:
    with running(running=1) as (engine, gate):
        gate.open.clear()
        listeners = [ask(engine, REQUEST) for _ in range(3)]
        closer = Thread(target=engine.close, kwargs={"drain": True})
        closer.start()
        until(lambda: engine.closed)
        with pytest.raises(RuntimeError):
            engine.submit(REQUEST, print)
        gate.open.set()
        closer.join(LONG)
        assert not closer.is_alive()
        for listener in listeners:
            check_answers(REQUEST, listener.wait())


def test_the_heartbeat_of_a_hung_step_grows_old_and_of_an_idle_engine_does_not() -> None:
    with running() as (engine, gate):
        gate.open.clear()
        listener = ask(engine, REQUEST)
        until(lambda: engine.heartbeat_age > 0.6)  # an idle engine's is renewed before
        assert engine.stats().requests_finished == {}
        gate.open.set()
        listener.wait()
        until(lambda: engine.heartbeat_age < 0.3)
        until(lambda: engine.heartbeat_age > 0.3)
        until(lambda: engine.heartbeat_age < 0.3)


def test_an_idle_engine_that_holds_something_is_counted_and_serves_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = Scheduler(PagePool(8), PAGE, CAPACITY, 2, 32)
    scheduler.pool.take(2)
    with Engine(scheduler, FakeModel(8, PAGE), VOCABULARY) as engine:
        engine.cancel(0)
        until(lambda: engine.stats().violations > 0)
        check_answers(REQUEST, ask(engine, REQUEST).wait())
    assert "idle with 0 choices open and 6 of 8 pages free" in caplog.text


def test_a_bug_of_ours_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    with running() as (engine, gate):
        gate.open.clear()
        listeners = [ask(engine, GenerationRequest(PROMPT, 9, choices=2))]
        gate.reached.wait(LONG)
        listeners.append(ask(engine, REQUEST))  # not yet heard when the engine stops
        gate.model.run = lambda plan: []  # type: ignore[method-assign]
        gate.open.set()
        for listener in listeners:
            for event in listener.wait():
                assert event.finish == "error"
                assert event.usage == Usage(8, 0, 0)
                assert event.error is not None
                assert "the engine stopped" in event.error
        engine._thread.join(LONG)
        assert engine.closed
        assert engine.stats().requests_finished == {"error": 3}
        with pytest.raises(RuntimeError, match="closed"):
            engine.submit(REQUEST, print)
        _forget(engine)


def _forget(engine: Engine) -> None:
    """An engine that stopped has things left in it: here they do not matter."""
    scheduler = engine._scheduler
    for sequence in scheduler.running + scheduler.waiting:
        scheduler.finish(sequence, "error")
    engine._stats = engine._count()


def test_a_listener_may_ask_again() -> None:
    with running() as (engine, _):
        second = Listener()

        def ask_again(event: Event) -> None:
            if event.finish is not None:
                engine.submit(REQUEST, second)

        engine.submit(REQUEST, ask_again)
        check_answers(REQUEST, second.wait())
