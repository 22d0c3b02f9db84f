"""The pipeline as a Prefect flow on a real server: task runs people can read, and a second run all cached."""

import uuid
from pathlib import Path

import pytest

from artifacts import Store
from riftco.errors import InputError
from tests.tiny import tiny_pipeline


def test_the_flow_runs_every_stage_and_then_skips_every_stage(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, LogFilter, LogFilterFlowRunId
    from prefect.logging.handlers import APILogHandler
    from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

    from flows.pipeline import pipeline

    monkeypatch.setenv("RIFTCO_STORE", str(tmp_path / "store"))
    config = tiny_pipeline(f"name=tiny-{uuid.uuid4().hex[:8]}")  # the server's database outlives the test
    with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: True}):
        made = pipeline(config)
        APILogHandler().flush()
    assert made == pipeline(config)
    stages = Store.open().run_stages(config.name)
    assert len(stages) == 16
    assert made == {stage: kept.record.results for stage, kept in stages.items()}

    with get_client(sync_client=True) as client:
        only_ours = FlowRunFilter(name=FlowRunFilterName(any_=[config.name]))
        runs = client.read_task_runs(flow_run_filter=only_ours)
        ids = [run.id for run in client.read_flow_runs(flow_run_filter=only_ours)]
        logs = client.read_logs(log_filter=LogFilter(flow_run_id=LogFilterFlowRunId(any_=ids)))
    said = [log.message for log in logs if log.name == "riftco"]
    assert any(line.startswith("pretrain: done in") for line in said), said
    states = {}
    for run in runs:
        states.setdefault(run.name, set()).add(run.state_name)
    assert f"pretrain {config.name}" in states
    assert f"tune-rank 2 {config.name}" in states
    assert set(map(frozenset, states.values())) == {frozenset({"Completed", "Cached"})}
    assert len(states) == 16


def test_a_stage_that_is_none_is_told_before_anything_runs(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.pipeline import pipeline

    monkeypatch.setenv("RIFTCO_STORE", str(tmp_path / "store"))
    for wrong in ({"force": ("pretrian",)}, {"from_stage": "pretrian"}):
        with pytest.raises(InputError, match="no stage is called 'pretrian'; the stages are prepare-corpus"):
            pipeline(tiny_pipeline(), **wrong)
    assert Store.open().runs() == []


def test_the_flows_parameters_make_a_form() -> None:
    from flows.pipeline import pipeline

    schema = pipeline.parameters.model_dump()
    text = str(schema)
    assert "Micro-world stories to generate" in text
    assert "Seeds both the initial weights and the batches" in text
