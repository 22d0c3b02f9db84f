"""A DAG as the body of a Prefect flow: what all flows share."""

from collections.abc import Callable
from typing import Any, TypeVar

from prefect.task_runners import ThreadPoolTaskRunner

from artifacts import Store
from flows.dag import FlowConfig, Sources
from riftco.progress import show_progress
from tasks.call import Results
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

    Every step is skipped if its results are there.
    """
    store = Store.open()
    sources = Sources.read(config, store, put=True)
    with (
        show_progress() as report,
        PrefectRunner(store, config.name, force=force, from_stage=from_stage, report=report) as runner,
    ):
        dag(config, sources)
        return runner.made()
