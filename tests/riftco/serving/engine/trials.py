"""Random trials: an engine turned by hand over `FakeModel`, many requests, and everything that may go wrong.

A trial is a function of its seed. It fails with an exception if an invariant or an answer is wrong.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

from riftco.serving.engine import engine as engine_module
from riftco.serving.engine.engine import Engine
from riftco.serving.engine.page_pool import PagePool
from riftco.serving.engine.request import Event, GenerationRequest, SamplingParams
from riftco.serving.engine.sequence import State
from tests.riftco.serving.engine.fake_model import (
    VOCABULARY,
    FakeModel,
    alone,
    is_stopped,
    logprob_of,
    text_of,
)
from tests.riftco.serving.engine.invariants import WatchedScheduler

STRINGS = ("a", "b", "ab", "ba", "bab", "c ", "é", "€", "a€b", "日", "�", "�b", "cab", "aaaa")


class NoThread:
    """In place of the engine's thread: the trial turns the engine."""

    def __init__(self, **_: object) -> None: ...

    def start(self) -> None: ...

    def is_alive(self) -> bool:
        return True


@dataclass(slots=True)
class Clock:
    """In place of `monotonic`."""

    now: float = 0.0


@dataclass(slots=True)
class Asked:
    """A request, when it was asked for, and what came of it."""

    request: GenerationRequest
    request_id: int
    time: float
    cancelled: bool = False
    events: list[Event] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return sum(event.finish is not None for event in self.events) == self.request.choices


class Trial:
    """An engine, its clock, and a seeded source of trouble. `seen` counts the situations that came up."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.random = random = Random(seed)
        self.clock = clock
        self.seen: Counter[str] = Counter()
        self.capacity = random.choice((1, 2, 3, 5, 8, 8, 12, 12, 13, 16))
        self.page_size = random.choice((1, 2, 3, 4, 4, self.capacity, self.capacity + 1))
        least = -(-self.capacity // self.page_size)
        pages = least + random.choice((0, 0, 0, 1, 1, 2, least, 4 * least))
        maximum_running = random.randint(1, 6)
        self.end_of_text_id = random.choice((None, 0))
        self.scheduler = WatchedScheduler(
            PagePool(pages),
            page_size=self.page_size,
            capacity=self.capacity,
            maximum_running=maximum_running,
            step_tokens=maximum_running + random.choice((0, 1, 3, self.capacity, 4 * self.capacity)),
            prefix_cache=random.random() < 0.85,
            end_of_text_id=self.end_of_text_id,
        )
        self.model = FakeModel(pages, self.page_size)
        self.scheduler.watch(self.model)
        self.engine = Engine(self.scheduler, self.model, VOCABULARY)
        self.trouble = random.choice((0.0, 0.0, 0.05, 0.2))  # chance of a failed step
        self.base = [random.randrange(len(VOCABULARY)) for _ in range(2 * self.capacity + 3)]
        self.asked: list[Asked] = []
        self.work = 0  # more steps than this trial can need

    def run(self) -> Counter[str]:
        random = self.random
        to_ask = random.randint(1, 6)
        while to_ask or self.scheduler.busy:
            self.clock.now += 1.0
            changed = False
            if to_ask and (not self.scheduler.busy or random.random() < 0.5):
                together = min(to_ask, random.choice((1, 1, 2, 3)))
                to_ask -= together
                changed = True
                for _ in range(together):
                    self._ask()
            if self.asked and random.random() < 0.06:
                changed = True
                self._cancel()
            if self.scheduler.busy and random.random() < self.trouble:
                self._fail()
            if changed or self.scheduler.busy:
                self._turn()
        self._check_end()
        return self.seen

    def _ask(self) -> None:
        request = self._request()
        asked = Asked(request, 0, self.clock.now)
        asked.request_id = self.engine.submit(request, asked.events.append)
        self.asked.append(asked)
        self.work += 8 * request.choices * (request.max_new_tokens + 2) * (self.capacity + 1)

    def _request(self) -> GenerationRequest:
        random, capacity = self.random, self.capacity
        repeated = self.asked and random.random() < 0.3
        if repeated:
            prompt = random.choice(self.asked).request.prompt_ids
        else:
            length = random.randint(0, 4) * self.page_size + random.randint(-1, 1)
            length = min(max(1, length), capacity + capacity // 2 + 1)
            prompt = tuple(self.base[:length])
            if random.random() < 0.2:
                prompt = (*prompt[:-1], random.randrange(len(VOCABULARY)))
        policies = ("slide", "half", "stop") if len(prompt) < capacity else ("slide", "half")
        return GenerationRequest(
            prompt,
            max_new_tokens=random.choice((1, 2, 4, 7, 12, capacity, capacity)),
            sampling=SamplingParams(temperature=random.choice((0.0, 1.0)), seed=random.randint(0, 2)),
            choices=random.choice((1, 1, 1, 2, 3, 4)),
            stop=tuple(random.sample(STRINGS, random.choice((0, 0, 0, 1, 2, 3)))),
            overflow=random.choice(policies),
            top_logprobs=random.choice((None, None, 0, 2)),
            seconds=random.choice((None, None, None, None, None, None, 5.0, 20.0)),
            salt=random.choice((b"", b"", b"", b"x", b"y")),
        )

    def _cancel(self) -> None:
        """Cancel any request, finished or not, and note in what states its sequences were."""
        asked = self.random.choice(self.asked)
        for sequence in self.scheduler.running + self.scheduler.waiting:
            if sequence.request_id == asked.request_id:
                self.seen[f"cancelled in {sequence.state.value}"] += 1
                self.seen["cancelled a follower"] += sequence.leader is not None
                others = self.scheduler.waiting
                self.seen["cancelled a leader"] += any(s.leader is sequence for s in others)
        asked.cancelled = asked.cancelled or not asked.finished
        self.engine.cancel(asked.request_id)

    def _fail(self) -> None:
        """A step that comes to nothing, of which the engine is told or not."""
        if self.model.error is not None or self.random.random() < 0.2:
            self.model.error = RuntimeError("out of luck")
            return
        plan = self.scheduler.plan()
        assert plan is not None
        if self.random.random() < 0.5:
            self.model.run(plan)
        self._note(plan.copies, "aborted")
        self.scheduler.abort(plan)
        self.seen["aborted an admission"] += any(work.admitted for work in plan.work)
        self.seen["aborted with new pages"] += any(work.new_pages and not work.admitted for work in plan.work)

    def _note(self, copies: tuple[tuple[int, int], ...], what: str) -> None:
        self.seen[f"{what} a copy"] += bool(copies)
        self.seen[f"{what} two copies of a page"] += len({s for s, _ in copies}) < len(copies)

    def _turn(self) -> None:
        self.work -= 1
        assert self.work > -50, "E9: no end in sight"
        preemptions = self.scheduler.preemptions
        failing = self.model.error
        self.engine._turn()
        if self.model.fault is not None:
            raise self.model.fault
        self.seen["preempted"] += self.scheduler.preemptions > preemptions
        self.seen["failed"] += failing is not None and self.model.error is None
        for sequence in self.scheduler.running:
            self.seen[sequence.state.value] += 1
            self.seen["came back after a slide"] += sequence.slid and sequence.preempted
        for asked in self.asked:
            late = asked.request.seconds is not None and self.clock.now >= asked.time + asked.request.seconds
            if asked.cancelled or late:
                assert asked.finished, "E10: cancelled or late, and still there"
            if asked.request.seconds is not None and not late:
                assert not any(event.finish == "timeout" for event in asked.events), "ended too soon"

    def _check_end(self) -> None:
        pool = self.scheduler.pool
        assert pool.counts == [0] * pool.page_count, "E10: idle, and pages are in use"
        usage: Counter[str] = Counter()
        for asked in self.asked:
            for choice in range(asked.request.choices):
                usage += self._check_answer(asked, choice)
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.violations) == (0, 0, 0)
        assert stats.free_pages == stats.pages == pool.page_count
        assert stats.generated_tokens == usage["generated"]
        assert stats.prompt_tokens == usage["prompt"]
        assert stats.cached_tokens == usage["cached"]
        assert stats.requests_finished == {r: usage[r] for r in stats.requests_finished}
        assert sum(stats.requests_finished.values()) == sum(a.request.choices for a in self.asked)

    def _check_answer(self, asked: Asked, choice: int) -> Counter[Any]:
        """E11 and E13 of one choice; what it counts for."""
        request = asked.request
        events = [event for event in asked.events if event.choice == choice]
        last = events[-1]
        assert [event for event in events if event.finish is not None or event.usage is not None] == [last]
        tokens = tuple(token for event in events for token in event.token_ids)
        text = "".join(event.text for event in events)
        expected = alone(request, choice, self.capacity, self.end_of_text_id)
        assert last.finish is not None
        self.seen[last.finish] += 1
        if last.finish in ("stop", "length"):
            assert (tokens, text, last.finish) == (expected.token_ids, expected.text, expected.finish), "E11"
        else:
            assert tokens == expected.token_ids[: len(tokens)], "E11"
            assert not is_stopped(tokens, request.stop)
            assert text == text_of(tokens, request.stop)
            assert last.finish != "cancelled" or asked.cancelled
            assert last.finish != "timeout" or request.seconds is not None
        assert (last.error == "out of luck") == (last.finish == "error")
        logprobs = [logprob_of(token, request) for token in tokens if request.top_logprobs is not None]
        assert [one for event in events for one in event.logprobs] == logprobs
        cached = self._cached_tokens(asked, choice)
        assert last.usage is not None
        counts = (last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.generated_tokens)
        assert counts == (len(request.prompt_ids), cached, len(tokens)), "E13"
        self.seen["cached"] += cached > 0
        return Counter(dict(zip(("prompt", "cached", "generated"), counts, strict=True))) + Counter(
            [last.finish]
        )

    def _cached_tokens(self, asked: Asked, choice: int) -> int:
        return self.scheduler.first_begins.get((asked.request_id, choice), 0)


def run_trial(seed: int) -> Counter[str]:
    """One trial; the situations that it saw."""
    clock = Clock()
    with (
        patch.object(engine_module, "Thread", NoThread),
        patch.object(engine_module, "monotonic", lambda: clock.now),
        patch.object(engine_module._logger, "disabled", True),
    ):
        return Trial(seed, clock).run()


SITUATIONS = frozenset(
    {
        *(f"cancelled in {state.value}" for state in State if state is not State.FINISHED),
        *(state.value for state in (State.PREFILL, State.DECODE, State.REPLAY)),
        *(
            "cancelled a follower",
            "cancelled a leader",
            "preempted",
            "failed",
            "came back after a slide",
            "cached",
        ),
        *("aborted an admission", "aborted with new pages", "aborted a copy", "aborted two copies of a page"),
        *("stop", "length", "cancelled", "timeout", "error"),
    }
)
"""What the trials must have met, taken together."""
