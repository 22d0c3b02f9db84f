"""Runs each call of a step as a Prefect task run, which the UI shows with its name, inputs, state and log.

Prefect only schedules and shows. Its own cache is off, because it believes results that are gone; a step
found in the store ends in the state `Completed` named "Cached".
"""

import inspect
import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import httpx
from prefect import Task, get_client
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterId
from prefect.states import Completed, State

from riftco.log import LOGGER
from tasks.call import Call, Results
from tasks.runner import PlainRunner

_RECORD_SECONDS = 10.0


class PrefectRunner(PlainRunner):
    """Active inside a flow: `with PrefectRunner(store, run): dag(config)`.

    One call runs in the flow's own thread, where a signal reaches it. Mapped calls go to the flow's task
    runner. Leaving the block waits until the server has recorded every task run, which it does from events
    and so a moment later: a server that is stopped at once would lose them.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._task_run_ids: set[UUID] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy for another process only executes calls: claims, signals and records stay here."""
        return PrefectRunner, (self.store, self.run_name)

    def run(self, call: Call) -> Results:
        """The results of a call, as one task run."""
        self.claim(call)
        return self._results(self._task(call)(**call.arguments, return_state=True))

    def run_all(self, calls: Sequence[Call]) -> list[Results]:
        """The results of the calls, each a task run of the flow's task runner."""
        futures = []
        for call in calls:
            self.claim(call)
            futures.append(self._task(call).submit(**call.arguments))
        try:
            for future in futures:
                future.wait()
        except BaseException:
            self._stopping.set()  # bodies in other threads see it at their next progress
            raise
        return [self._results(future.state) for future in futures]

    def _task(self, call: Call) -> Task[..., Any]:
        forced = self.is_forced(call)

        def execute(**arguments: Any) -> Any:
            # The arguments are for Prefect, which draws the graph from them; the call has its own, untouched.
            results, cached = self.execute(call, forced)
            return Completed(name="Cached", data=results) if cached else results

        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in call.arguments]
        execute.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        execute.__qualname__ = execute.__name__ = call.step.replace("-", "_")
        execute.__module__ = call.body.__module__
        return Task(
            execute,
            name=call.step,
            description=inspect.getdoc(call.body),
            version=str(call.version),
            task_run_name=f"{call.title} {self.run_name}",
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=0,
        )

    def _results(self, state: State[Any]) -> Results:
        if state.state_details.task_run_id:
            self._task_run_ids.add(state.state_details.task_run_id)
        return state.result()  # raises what the step raised

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        self._wait_for_records()

    def _wait_for_records(self) -> None:
        missing, deadline = set(self._task_run_ids), time.monotonic() + _RECORD_SECONDS
        try:
            with get_client(sync_client=True) as client:
                while missing and time.monotonic() < deadline:
                    some = TaskRunFilter(id=TaskRunFilterId(any_=sorted(missing)[:100]))
                    runs = client.read_task_runs(task_run_filter=some)
                    missing -= {run.id for run in runs if run.state and run.state.is_final()}
                    time.sleep(0.05 if missing else 0)
        except httpx.HTTPError as error:
            LOGGER.warning("cannot ask the Prefect server for its records: %s", error)
        if missing:
            LOGGER.warning("the Prefect server has not recorded %d task runs", len(missing))
