"""A DAG as the body of a Prefect flow: what all flows share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from prefect.logging.handlers import APILogHandler
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from artifacts import Store
from flows.dag import FlowConfig, Sources
from riftco.log import LOGGER
from riftco.progress import show_progress
from tasks.call import Results
from tasks.plan import PlanRunner
from tasks.prefect_runner import PrefectRunner

AnyFlowConfig = TypeVar("AnyFlowConfig", bound=FlowConfig)

one_at_a_time: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=1)
"""Runs one mapped task at a time: training uses every core already."""


def run_dag(
    dag: Callable[[AnyFlowConfig, Sources], Results],
    config: AnyFlowConfig,
    force: tuple[str, ...],
    from_stage: str | None,
) -> dict[str, Results]:
    """The results of each stage of a DAG, run in the store that is open to this process.

    Every step is skipped if its results are there. InputError, before anything runs, for a stage that the DAG
    does not have.
    """
    store, from_stage = Store.open(), from_stage or None  # a form sends "" for nothing
    sources = Sources.read(config, store, put=True)
    if named := [*force, *filter(None, [from_stage])]:
        with PlanRunner(store, config.name) as plan:
            dag(config, sources)
        plan.require_stages(named)
    with (
        _log_in_prefect(),
        show_progress() as report,
        PrefectRunner(store, config.name, force=force, from_stage=from_stage, report=report) as runner,
    ):
        dag(config, sources)
        return runner.made()


@contextmanager
def _log_in_prefect() -> Iterator[None]:
    """The project's log in the flow run's, as `local_prefect` arranges it and a worker does not."""
    if any(isinstance(handler, APILogHandler) and not handler.filters for handler in LOGGER.handlers):
        yield
        return
    handler, own = APILogHandler(), flow_run.id
    handler.addFilter(lambda record: flow_run.id == own)  # another flow of this process has its own
    LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
