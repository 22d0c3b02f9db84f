"""The pipeline as a Prefect flow on a real server: task runs people can read, and a second run all cached."""

import uuid
from pathlib import Path

import pytest

from artifacts import Store
from tests.tiny import tiny_pipeline


def test_the_flow_runs_every_stage_and_then_skips_every_stage(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

    from flows.pipeline import pipeline

    monkeypatch.setenv("RIFTCO_STORE", str(tmp_path / "store"))
    config = tiny_pipeline(f"name=tiny-{uuid.uuid4().hex[:8]}")  # the server's database outlives the test
    made = pipeline(config)
    assert made == pipeline(config)
    stages = Store.open().run_stages(config.name)
    assert len(stages) == 14
    assert made == {stage: kept.record.results for stage, kept in stages.items()}

    with get_client(sync_client=True) as client:
        only_ours = FlowRunFilter(name=FlowRunFilterName(any_=[config.name]))
        runs = client.read_task_runs(flow_run_filter=only_ours)
    states = {}
    for run in runs:
        states.setdefault(run.name, set()).add(run.state_name)
    assert f"pretrain {config.name}" in states
    assert f"tune-rank 2 {config.name}" in states
    assert set(map(frozenset, states.values())) == {frozenset({"Completed", "Cached"})}
    assert len(states) == 14


def test_the_flows_parameters_make_a_form() -> None:
    from flows.pipeline import pipeline

    schema = pipeline.parameters.model_dump()
    text = str(schema)
    assert "Micro-world stories to generate" in text
    assert "Seeds both the initial weights and the batches" in text
