"""The pipeline as a Prefect flow. Import it inside `local_prefect()`, or where PREFECT_API_URL is set."""

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from artifacts import Ref, Store
from flows.dag import Sources, pipeline_dag
from riftco.config import PipelineConfig
from riftco.progress import show_progress
from tasks.prefect_runner import PrefectRunner


@flow(
    name="pipeline",
    flow_run_name="{config.name}",
    # One mapped task at a time: training uses every core already.
    task_runner=ThreadPoolTaskRunner(max_workers=1),  # type: ignore[arg-type]
    persist_result=False,
)
def pipeline(
    config: PipelineConfig, force: tuple[str, ...] = (), from_stage: str | None = None
) -> dict[str, Ref]:
    """Raw text and instructions to a served model: every step is skipped if the store has its results.

    Args:
        config: what to run.
        force: stages to run although the store has their results.
        from_stage: run this stage and all after it.
    """
    store = Store.open()
    sources = Sources.read(config, store)
    with (
        show_progress() as report,
        PrefectRunner(store, config.name, force=force, from_stage=from_stage, report=report),
    ):
        return pipeline_dag(config, sources)
