"""The two services as their libraries see us: small fakes always, the libraries themselves where they are."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from riftco.training.tracking.services import Record, open_services
from tests.riftco.training.tracking.support import forget

RECORDS = [
    *(
        Record(step, 100.0 + step, {"train/loss": 1.0 / step, "train/perplexity": 3.0})
        for step in range(1, 4)
    ),
    Record(3, 103.5, {}, "\nMara <b>"),
]
SETTINGS = {"steps": 3, "lora": {"rank": 4}}


def track(name: str, folder: Path, *, failed: bool = False) -> None:
    (courier,) = open_services([name], "book", folder, SETTINGS)
    for record in RECORDS:
        courier.put(record)
    courier.close(failed=failed)


def fake(monkeypatch: pytest.MonkeyPatch, service: str, **modules: ModuleType) -> None:
    forget(monkeypatch, service)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)


@pytest.mark.parametrize("failed", [False, True])
def test_wandb_gets_settings_numbers_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    opened: dict[str, Any] = {}
    said: list[tuple[Any, ...]] = []

    def init(**arguments: Any) -> Any:
        opened.update(arguments)
        return SimpleNamespace(
            log=lambda values, step: said.append((step, values)),
            finish=lambda exit_code: said.append(("finish", exit_code)),
        )

    module = ModuleType("wandb")
    module.init, module.Settings = init, SimpleNamespace  # type: ignore[attr-defined]
    module.Html = lambda text, inject: text  # type: ignore[attr-defined]
    fake(monkeypatch, "wandb_run", wandb=module)
    monkeypatch.setenv("WANDB_PROJECT", "novels")
    track("wandb", tmp_path, failed=failed)
    assert (opened["project"], opened["name"], opened["config"]) == ("novels", "book", SETTINGS)
    assert opened["settings"].console == "off"
    assert said[:3] == [(record.step, dict(record.numbers)) for record in RECORDS[:3]]
    assert said[3:] == [(3, {"sample": "<pre>\nMara &lt;b&gt;</pre>"}), ("finish", int(failed))]


@pytest.mark.parametrize(("failed", "status"), [(False, "FINISHED"), (True, "FAILED")])
@pytest.mark.parametrize("known", [False, True])
def test_mlflow_gets_settings_numbers_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool, status: str, known: bool
) -> None:
    said: list[tuple[Any, ...]] = []

    class Client:
        def get_experiment_by_name(self, name: str) -> Any:
            said.append(("experiment", name))
            return SimpleNamespace(experiment_id="7") if known else None

        def create_experiment(self, name: str) -> str:
            return f"new {name}"

        def create_run(self, experiment: str, run_name: str) -> Any:
            said.append(("run", experiment, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def log_batch(self, run: str, *, metrics: Any = (), params: Any = ()) -> None:
            said.extend([*params, *metrics])

        def log_text(self, run: str, text: str, file: str) -> None:
            said.append((run, text, file))

        def set_terminated(self, run: str, status: str) -> None:
            said.append((run, status))

    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    module.MlflowClient = Client  # type: ignore[attr-defined]
    entities.Metric = entities.Param = lambda *values: values  # type: ignore[attr-defined]
    fake(monkeypatch, "mlflow_run", mlflow=module, mlflow__entities=entities)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "novels")
    track("mlflow", tmp_path, failed=failed)
    assert said[:4] == [
        ("experiment", "novels"),
        ("run", "7" if known else "new novels", "book"),
        ("steps", "3"),
        ("lora", "{'rank': 4}"),
    ]
    numbers = [(n, v, int(1000 * r.time), r.step) for r in RECORDS for n, v in r.numbers.items()]
    assert [each for each in said[4:] if len(each) == 4] == numbers
    assert said[-2:] == [("r", "\nMara <b>", "samples/3.txt"), ("r", status)]


def test_mlflow_never_gets_more_metrics_at_once_than_a_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    module.MlflowClient = SimpleNamespace  # type: ignore[attr-defined]
    entities.Metric = entities.Param = lambda *values: values  # type: ignore[attr-defined]
    fake(monkeypatch, "mlflow_run", mlflow=module, mlflow__entities=entities)
    from riftco.training.tracking.mlflow_run import MlflowRun

    run = MlflowRun.__new__(MlflowRun)
    run._client = SimpleNamespace(log_batch=lambda run, metrics: sizes.append(len(metrics)))
    run._id = "r"
    run.log([Record(1, 0.0, {f"n{i}": 1.0 for i in range(1001)}), Record(2, 0.0, {"n": 1.0})])
    assert sizes == [1000, 2]


def test_wandb_itself_writes_a_run_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    track("wandb", tmp_path)
    (run,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    data = run.read_bytes()
    assert b"train/loss" in data
    (sample,) = tmp_path.glob("wandb/offline-run-*/files/media/html/sample_*.html")
    assert sample.read_text() == "<pre>\nMara &lt;b&gt;</pre>"


def test_mlflow_itself_keeps_a_run_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    track("mlflow", tmp_path)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("riftco").experiment_id])
    assert (run.info.run_name, run.info.status) == ("book", "FINISHED")
    assert run.data.params == {"steps": "3", "lora": "{'rank': 4}"}
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in losses] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id, "samples")] == [
        "samples/3.txt"
    ]
