"""Runs steps in this process: from the store where their results are intact, else the body, only once.

A memo is believed only if every object it names is there and hashes to its name; a missing or damaged one
means that the step runs again, never an error. Processes that want the same results take turns, and whoever
comes second finds them made.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from artifacts import Ref, StepRecord, Store, StoreError
from riftco.exclusive import exclusive
from riftco.log import LOGGER
from riftco.progress import ProgressLog, ReportProgress
from tasks.call import Call, Results, Runner, Work
from tasks.step import main_result


class Interrupted(Exception):
    """The run was stopped while a step was at work; the same command goes on from what is finished."""


class Outcome(NamedTuple):
    """What a call gave, and whether the store had it already."""

    results: Results
    cached: bool


class PlainRunner(Runner):
    """Runs each step at once, in this process and thread, without Prefect."""

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        force: Collection[str] = (),
        from_stage: str | None = None,
        report: ReportProgress | None = None,
    ) -> None:
        """A runner for the run of that name.

        force: stages or steps to run although the store has their results. from_stage: so with this one and
        every one after it. report: shows progress; without it, the log gets a line now and then.
        """
        super().__init__(store, run)
        self._force = frozenset(force)
        self._from_stage = from_stage
        self._seen: set[str | None] = set()
        self._report = report or ProgressLog()
        self._stopping = threading.Event()

    def run(self, call: Call) -> Results:
        """The results of a call, run now unless the store has them."""
        self.claim(call)
        return self.execute(call, self.is_forced(call)).results

    def run_all(self, calls: Sequence[Call]) -> list[Results]:
        """The results of the calls, one after the other."""
        return [self.run(call) for call in calls]

    def made(self) -> dict[str, Results]:
        """The results of each stage of this run, whatever the run's name has come to mean since."""
        records = {stage: self.store.recall(call.key) for stage, call in self._claimed.items()}
        return {stage: record.results for stage, record in records.items() if record}

    def claim(self, call: Call) -> None:
        """As `Runner.claim`, and take note that the run has come to this stage."""
        super().claim(call)
        self._seen |= {call.stage, call.step}

    def is_forced(self, call: Call) -> bool:
        """Whether a claimed call is to run although the store has its results."""
        return self._from_stage in self._seen or not self._force.isdisjoint((call.stage, call.step))

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        unknown = (self._force | {self._from_stage}) - self._seen - {None}
        if kind is None and unknown:
            stages = ", ".join(self._claimed)
            raise ValueError(f"no stage is called {', '.join(map(repr, unknown))}; the stages are {stages}")

    def execute(self, call: Call, forced: bool) -> Outcome:
        """Make sure that the call's results are in the store and that the run's stage means them."""
        key = call.key
        record, damage = (None, "") if forced else recall_intact(self.store, key)
        if damage:
            LOGGER.warning("%s: %s; running it again", call.title, damage)
        cached = record is not None
        if record is None:
            lock = self.store.root / "locks" / f"{key}.lock"
            waiting = f"{call.title}: another process is making it; waiting"
            stopped = f"{call.title} was stopped while another process was making it"
            with exclusive(lock, lambda: LOGGER.info(waiting), lambda: self._go_on(stopped)):
                record = None if forced else recall_intact(self.store, key)[0]
                cached = record is not None
                record = record or self._make(call, key)
        if cached:
            LOGGER.info("%s: up to date (%s)", call.title, short(record.results))
        self.store.name_run(self.run_name, call.stage, key, record)
        return Outcome(record.results, cached)

    def _make(self, call: Call, key: str) -> StepRecord:
        start = time.monotonic()
        workspace = self.store.workspace(key)
        if self.store.recall(key):  # what is left there led to results already
            workspace.clear()
        root = self.store.root
        folder = root.parent / "tracking" / root.name / self.run_name / call.stage
        work = Work(self.store, self.run_name, LOGGER, self._progress(call.title), workspace, folder)
        results = call.body(work, **call.arguments)
        if not (isinstance(results, dict) and results and all(isinstance(r, Ref) for r in results.values())):
            raise TypeError(f"step {call.step} must return references by name, got {results!r}")
        seconds = time.monotonic() - start
        record = StepRecord(call.step, call.version, call.recipe, results, round(seconds, 3))
        standing = self.store.remember(key, record)
        workspace.clear()
        LOGGER.info("%s: done in %s -> %s", call.title, readable(seconds), short(results))
        if standing.results != results:
            LOGGER.warning("%s: differs from the intact results of an earlier run, which stay", call.title)
        return standing

    def _go_on(self, stopped: str) -> None:
        if self._stopping.is_set():
            raise Interrupted(stopped)

    def _progress(self, title: str) -> Callable[..., None]:
        def progress(done: int, total: int, **numbers: float) -> None:
            self._go_on(f"{title} was stopped at {done} of {total}")
            self._report(title, done, total, numbers)

        return progress


def recall_intact(store: Store, key: str) -> tuple[StepRecord | None, str]:
    """The record of a key if all its objects are intact, else None and, if there is a record, its damage."""
    record = store.recall(key)
    for name, ref in record.results.items() if record else ():
        try:
            store.check(ref)
        except StoreError as error:
            if error.code not in ("missing", "damaged"):
                raise
            return None, f"its {name} ({ref.digest[:12]}) is {error.code}"
    return record, ""


def short(results: Results) -> str:
    """The beginning of the main result's digest."""
    return main_result(results).digest[:12]


def readable(seconds: float) -> str:
    """A duration for people: `0.3 s`, `61 s`."""
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
