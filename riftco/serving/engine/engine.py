"""The engine: one thread that steps the scheduler and the model, taking requests and telling of tokens."""

import logging
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Protocol

from riftco.serving.engine.request import (
    Drawn,
    Event,
    FinishReason,
    GenerationRequest,
    TokenLogprob,
    Usage,
)
from riftco.serving.engine.scheduler import Plan, Scheduler
from riftco.serving.engine.sequence import Sequence
from riftco.serving.engine.text_assembler import TextAssembler

Sink = Callable[[Event], None]
_IDLE_SECONDS = 0.5
_logger = logging.getLogger("riftco.serving")


class QueueFullError(RuntimeError):
    """More requests wait than the engine admits; try again in `retry_after_seconds`."""

    def __init__(self, waiting: int, retry_after_seconds: int) -> None:
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after_seconds} s")
        self.retry_after_seconds = retry_after_seconds


class Runner(Protocol):
    """What the engine asks of a model: one drawn token for each of `plan.sampling`, in order."""

    def run(self, plan: Plan) -> list[Drawn]: ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts at one moment, and totals since the start."""

    running: int
    waiting: int
    pages: int
    free_pages: int
    cached_pages: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    violations: int
    requests_finished: dict[FinishReason, int]


@dataclass(slots=True)
class _Totals:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    violations: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)


@dataclass(slots=True)
class _Choice:
    """What belongs to one sequence and is not the scheduler's."""

    sequence: Sequence
    sink: Sink
    assembler: TextAssembler
    deadline: float


class Engine:
    """Generates for many requests at once, on a thread of its own. A context manager.

    `vocabulary` gives each token's bytes. Of a request's choices each is a sequence of its own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        vocabulary: tuple[bytes, ...],
        *,
        maximum_waiting: int = 256,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._vocabulary = vocabulary
        self._limit = scheduler.maximum_running + maximum_waiting
        self._token_limit = self._limit * scheduler.capacity  # of all prompts that are held
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._choices: dict[tuple[int, int], _Choice] = {}
        self._ids = count(1)
        self._lock = Lock()
        self._open_choices = 0
        self._open_tokens = 0
        self._closed = False
        self._totals = _Totals()
        self._news: list[tuple[Sink, Event]] = []
        self._stats = self._count()
        self._heartbeat = monotonic()
        self._thread = Thread(target=self._run, name="riftco-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, sink: Sink) -> int:
        """Queue a request and return its id. `sink` is called on the engine's thread and must not block.

        ValueError for what can never be served, QueueFullError when too much waits, RuntimeError when closed.
        """
        self._check(request)
        deadline = math.inf if request.seconds is None else monotonic() + request.seconds
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            tokens = request.choices * len(request.prompt_ids)
            if self._open_choices and (
                self._open_choices + request.choices > self._limit
                or self._open_tokens + tokens > self._token_limit
            ):
                waiting = max(0, self._open_choices - self._scheduler.maximum_running)
                raise QueueFullError(waiting, self._retry_after(waiting))
            request_id = next(self._ids)
            choices = [self._choice(request, request_id, i, sink, deadline) for i in range(request.choices)]
            self._open_choices += len(choices)
            self._open_tokens += tokens
            self._commands.put(lambda: self._add(choices))
        return request_id

    def cancel(self, request_id: int) -> None:
        """End every choice of a request that has not ended; harmless for one that has."""
        if self._thread.is_alive():
            self._commands.put(lambda: self._end_request(request_id, "cancelled"))

    def cancel_all(self) -> None:
        """End every choice of every request."""
        if self._thread.is_alive():
            self._commands.put(self._end_all)

    def stats(self) -> EngineStats:
        """Counts as they were after the latest step."""
        return self._stats

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine's loop last turned; idle, it turns twice a second."""
        return monotonic() - self._heartbeat

    @property
    def closed(self) -> bool:
        """Whether new requests are refused."""
        return self._closed

    def close(self, *, drain: bool = False) -> None:
        """Refuse new requests, finish those at work (`drain`) or cancel them, and end the thread.

        Harmless when repeated.
        """
        with self._lock:
            self._closed = True
        self._commands.put(_nothing if drain else self._end_all)
        self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, request: GenerationRequest) -> None:
        size, capacity = len(self._vocabulary), self._scheduler.capacity
        for extreme in (min(request.prompt_ids), max(request.prompt_ids)):
            if not 0 <= extreme < size:
                raise ValueError(f"token id {extreme} is outside the vocabulary of {size}")
        if request.sampling.top_k is not None and request.sampling.top_k > size:
            raise ValueError(f"top_k must not exceed the vocabulary of {size}")
        if request.choices > self._limit:
            raise ValueError(f"choices must be at most {self._limit}, which the engine admits together")
        if request.choices > 1 and request.choices * len(request.prompt_ids) > self._token_limit:
            raise ValueError(
                f"{request.choices} choices of a prompt of {len(request.prompt_ids)} tokens are more than "
                f"the {self._token_limit} tokens of prompts that the engine holds; ask for fewer"
            )
        if request.overflow == "stop" and len(request.prompt_ids) >= capacity:
            raise ValueError(
                f"the prompt has {len(request.prompt_ids)} tokens and the context {capacity}; "
                "shorten it, so that at least one token can follow"
            )

    def _retry_after(self, waiting: int) -> int:
        return max(1, math.ceil(waiting / self._scheduler.maximum_running))

    def _run(self) -> None:
        try:
            while not self._closed or self._choices or not self._commands.empty():
                self._turn()
        except Exception as error:  # a bug of ours: nobody may wait for ever for an engine that is gone
            _logger.exception("the engine stopped")
            with self._lock:
                self._closed = True
            self._abandon(f"the engine stopped: {_said(error)}")

    def _abandon(self, message: str) -> None:
        """Tell everyone who waits, those not yet heard included, that nothing more comes."""
        while not self._commands.empty():
            with suppress(Exception):
                self._commands.get()()
        for choice in list(self._choices.values()):
            with suppress(Exception):
                self._scheduler.finish(choice.sequence, "error")
            choice.sequence.finish = "error"
            self._close_choice(choice, choice.assembler.finish(), error=message)
        self._stats = self._count()
        self._tell_news()

    def _turn(self) -> None:
        self._take_commands()
        self._end_late()
        if self._scheduler.busy:
            self._step()
        else:
            self._check_idle()
        self._stats = self._count()
        self._tell_news()
        self._heartbeat = monotonic()

    def _tell_news(self) -> None:
        """Pass events on, after the counts that they belong to; a listener that fails harms nobody else."""
        for sink, event in self._news:
            try:
                sink(event)
            except Exception:
                _logger.exception("a listener failed")
        self._news.clear()

    def _take_commands(self) -> None:
        """Carry out what was asked, waiting a moment for it when there is nothing else to do."""
        try:
            if not self._scheduler.busy:
                self._commands.get(timeout=_IDLE_SECONDS)()
            while True:
                self._commands.get_nowait()()
        except Empty:
            return

    def _step(self) -> None:
        plan = self._scheduler.plan()
        if plan is None:
            return
        try:
            drawn = self._runner.run(plan)
        except Exception as error:
            _logger.exception("a step of %d sequences failed", len(plan.work))
            self._scheduler.abort(plan)
            for work in plan.work:
                self._end(work.sequence, "error", _said(error))
            return
        sampling = plan.sampling
        self._scheduler.commit(plan, [one.token_id for one in drawn])
        self._totals.steps += 1
        for sequence, one in zip(sampling, drawn, strict=True):
            self._tell(sequence, one)

    def _tell(self, sequence: Sequence, drawn: Drawn) -> None:
        """Pass a drawn token on, and find out whether its text ends the sequence."""
        choice = self._choices[sequence.arrival]
        if drawn.token_id is None or sequence.finish == "stop":  # end-of-text is no part of the text
            self._close_choice(choice, choice.assembler.finish(), error=drawn.error)
            return
        text = choice.assembler.push(self._vocabulary[drawn.token_id])
        news = (drawn.token_id,), () if drawn.logprob is None else (drawn.logprob,)
        if choice.assembler.stopped:
            self._scheduler.finish(sequence, "stop")
            sequence.finish = "stop"  # also where it was the last token that it might have
        if sequence.finish is None:
            self._news.append((choice.sink, Event(sequence.choice, news[0], text, news[1])))
        else:
            self._close_choice(choice, text + choice.assembler.finish(), *news)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        self._scheduler.finish(sequence, reason)
        choice = self._choices[sequence.arrival]
        self._close_choice(choice, choice.assembler.finish(), error=error)

    def _close_choice(
        self,
        choice: _Choice,
        text: str,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str | None = None,
    ) -> None:
        """The last event of a choice; afterwards nothing of it remains."""
        sequence, totals = choice.sequence, self._totals
        del self._choices[sequence.arrival]
        usage = _usage(sequence)
        totals.prompt_tokens += usage.prompt_tokens
        totals.cached_tokens += usage.cached_tokens
        totals.generated_tokens += usage.generated_tokens
        assert sequence.finish is not None
        totals.finished[sequence.finish] += 1
        with self._lock:
            self._open_choices -= 1
            self._open_tokens -= usage.prompt_tokens
        event = Event(sequence.choice, token_ids, text, logprobs, sequence.finish, usage, error)
        self._news.append((choice.sink, event))

    def _choice(
        self, request: GenerationRequest, request_id: int, number: int, sink: Sink, deadline: float
    ) -> _Choice:
        sequence = Sequence(request, request_id, number, self._scheduler.capacity)
        return _Choice(sequence, sink, TextAssembler(request.stop), deadline)

    def _add(self, choices: list[_Choice]) -> None:
        self._choices.update((choice.sequence.arrival, choice) for choice in choices)
        self._scheduler.add([choice.sequence for choice in choices])

    def _end_request(self, request_id: int, reason: FinishReason) -> None:
        for choice in [c for (number, _), c in self._choices.items() if number == request_id]:
            self._end(choice.sequence, reason)

    def _end_late(self) -> None:
        now = monotonic()
        for choice in [c for c in self._choices.values() if c.deadline <= now]:
            self._end(choice.sequence, "timeout")

    def _end_all(self) -> None:
        for choice in list(self._choices.values()):
            self._end(choice.sequence, "cancelled")

    def _check_idle(self) -> None:
        """With nothing to do, nothing may be held: counted and logged, because serving must go on."""
        pool = self._scheduler.pool
        if self._choices or pool.free_count != pool.page_count:
            self._totals.violations += 1
            _logger.error(
                "idle with %d choices open and %d of %d pages free",
                len(self._choices),
                pool.free_count,
                pool.page_count,
            )

    def _count(self) -> EngineStats:
        scheduler, totals = self._scheduler, self._totals
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages=scheduler.pool.page_count,
            free_pages=scheduler.pool.free_count,
            cached_pages=scheduler.pool.kept_count,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generated_tokens=totals.generated_tokens,
            preemptions=scheduler.preemptions,
            steps=totals.steps,
            violations=totals.violations,
            requests_finished=dict(totals.finished),
        )


def _usage(sequence: Sequence) -> Usage:
    return Usage(sequence.prompt_tokens, sequence.cached_tokens, sequence.generated_tokens)


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _nothing() -> None:
    """A command that only wakes the engine."""
