"""Pretraining as a Prefect flow. Import it inside `local_prefect()`, or where PREFECT_API_URL is set."""

from prefect import flow

from flows.dag import pretrain_dag
from flows.run_dag import one_at_a_time, run_dag
from riftco.config import PretrainFlowConfig
from tasks.call import Results


@flow(
    name="pretrain",
    flow_run_name="{config.name}",
    task_runner=one_at_a_time,  # type: ignore[arg-type]
    persist_result=False,
    retries=0,
)
def pretrain(
    config: PretrainFlowConfig, force: tuple[str, ...] = (), from_stage: str | None = None
) -> dict[str, Results]:
    """Raw text to a new model: every step is skipped if the store has its results.

    Args:
        config: what to run.
        force: stages to run although the store has their results.
        from_stage: run this stage and all after it.
    """
    return run_dag(pretrain_dag, config, force, from_stage)
