"""Steps as Prefect task runs: their names, states and graph, and that the store decides what runs."""

import pickle
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from artifacts import Ref, Store
from tests.flows.toy_steps import toy_dag

NAMES = ["join-texts demo", "repeat-text 2 demo", "repeat-text 3 demo", "write-text demo"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", durability="none")


@pytest.fixture
def text() -> str:
    """A text of this test alone: the server's database is older than the test."""
    return uuid.uuid4().hex


def run(
    store: Store, text: str, times: tuple[int, ...] = (2, 3), **options: Any
) -> tuple[Any, dict[str, Any]]:
    """The flow's result or failure, and its task runs by name, as the server has recorded them by then."""
    from prefect import flow, get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    from tasks.prefect_runner import PrefectRunner

    @flow(name="toy", persist_result=False)
    def toy() -> Ref:
        with PrefectRunner(store, "demo", **options):
            return toy_dag(text, times)["text"]

    state: Any = toy(return_state=True)
    with get_client(sync_client=True) as client:
        this_run = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        runs = client.read_task_runs(flow_run_filter=this_run)
    return state.result(raise_on_failure=False), {task_run.name: task_run for task_run in runs}


def state_names(task_runs: dict[str, Any]) -> set[str]:
    assert sorted(task_runs) == NAMES
    return {task_run.state.name for task_run in task_runs.values()}


def test_a_flow_runs_its_steps_once(prefect_api: str, store: Store, text: str) -> None:
    result, task_runs = run(store, text)
    assert isinstance(result, Ref)
    assert store.read_bytes(result).decode() == text * 2 + "+" + text * 3
    assert state_names(task_runs) == {"Completed"}
    again, task_runs = run(store, text)
    assert again == result
    assert state_names(task_runs) == {"Cached"}
    assert {task_run.state.type.value for task_run in task_runs.values()} == {"COMPLETED"}


def test_a_deleted_or_damaged_object_is_made_again(prefect_api: str, store: Store, text: str) -> None:
    result, _ = run(store, text)
    stages = store.run_stages("demo")
    store.path(stages["write-text"].record.results["text"]).unlink()
    damaged = store.path(stages["repeat-text-2"].record.results["text"])
    damaged.chmod(0o644)
    damaged.write_bytes(b"")
    again, task_runs = run(store, text)
    assert again == result
    states = {name: task_run.state.name for name, task_run in task_runs.items()}
    assert states == dict(zip(NAMES, ["Cached", "Completed", "Cached", "Completed"], strict=True))


def test_stages_are_forced_from_one_on(prefect_api: str, store: Store, text: str) -> None:
    run(store, text)
    _, task_runs = run(store, text, from_stage="repeat-text-3")
    states = {name: task_run.state.name for name, task_run in task_runs.items()}
    assert states == dict(zip(NAMES, ["Completed", "Cached", "Completed", "Cached"], strict=True))


def test_the_graph_shows_what_depends_on_what(prefect_api: str, store: Store, text: str) -> None:
    _, task_runs = run(store, text)
    ids = {name: str(task_run.id) for name, task_run in task_runs.items()}
    inputs = {
        name: {str(source.id) for sources in task_run.task_inputs.values() for source in sources}
        for name, task_run in task_runs.items()
    }
    written, repeated = {ids["write-text demo"]}, {ids["repeat-text 2 demo"], ids["repeat-text 3 demo"]}
    assert [inputs[name] for name in NAMES] == [repeated, written, written, set()]


def test_a_failing_step_fails_the_flow_and_keeps_what_is_finished(
    prefect_api: str, store: Store, text: str
) -> None:
    failure, task_runs = run(store, text, times=(2, 0))
    assert isinstance(failure, ValueError)
    assert str(failure) == "times must be at least 1, got 0"
    states = {name: task_run.state.name for name, task_run in task_runs.items()}
    assert states == {
        "write-text demo": "Completed",
        "repeat-text 2 demo": "Completed",
        "repeat-text 0 demo": "Failed",
    }
    assert sorted(store.run_stages("demo")) == ["repeat-text-2", "write-text"]
    _, task_runs = run(store, text)
    states = {name: task_run.state.name for name, task_run in task_runs.items()}
    assert states == dict(zip(NAMES, ["Completed", "Cached", "Completed", "Cached"], strict=True))


def test_a_runner_can_go_to_another_process(prefect_api: str, store: Store) -> None:
    from tasks.prefect_runner import PrefectRunner

    copy = pickle.loads(pickle.dumps(PrefectRunner(store, "demo", force=["write-text"])))
    assert (copy.store.root, copy.run_name) == (store.root, "demo")


class SlowRecorder:
    """A Prefect client that knows of one more finished task run each time it is asked."""

    def __init__(self, ids: list[uuid.UUID], unknown: int = 0) -> None:
        self.known: list[uuid.UUID] = []
        self.coming = ids[: len(ids) - unknown]

    def __enter__(self) -> "SlowRecorder":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def read_task_runs(self, task_run_filter: Any) -> list[Any]:
        if self.coming:
            self.known.append(self.coming.pop())
        state = SimpleNamespace(is_final=lambda: True)
        running = SimpleNamespace(is_final=lambda: False)
        final = [SimpleNamespace(id=known, state=state) for known in self.known]
        return [*final, *(SimpleNamespace(id=other, state=running) for other in self.coming)]


@pytest.mark.parametrize("unknown", [0, 1])
def test_a_flow_waits_for_its_records_but_not_for_ever(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, unknown: int
) -> None:
    from tasks import prefect_runner

    ids = [uuid.uuid4() for _ in range(3)]
    recorder = SlowRecorder(ids, unknown)
    monkeypatch.setattr(prefect_runner, "get_client", lambda sync_client: recorder)
    monkeypatch.setattr(prefect_runner, "_RECORD_SECONDS", 0.3)
    with prefect_runner.PrefectRunner(store, "demo") as runner:
        runner._task_run_ids.update(ids)
    assert len(recorder.known) == 3 - unknown
    assert caplog.messages == ["the Prefect server has not recorded 1 task runs"] * unknown
