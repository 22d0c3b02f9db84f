"""A run of MLflow. The library's own variables say where: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from riftco.training.tracking.services import Record, Settings

_MOST_METRICS = 1000  # that a server takes at once


class MlflowRun:
    """One new run in the experiment `riftco`, or the one that MLFLOW_EXPERIMENT_NAME names."""

    def __init__(self, run: str, folder: Path, settings: Settings) -> None:
        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "riftco")
        experiment = self._client.get_experiment_by_name(name)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = self._client.create_run(identity, run_name=run).info.run_id
        self._client.log_batch(self._id, params=[Param(name, str(value)) for name, value in settings.items()])

    def log(self, records: Sequence[Record]) -> None:
        metrics = list(_metrics(records))
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MOST_METRICS])
        for record in records:
            if record.text is not None:
                self._client.log_text(self._id, record.text, f"samples/{record.step}.txt")

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _metrics(records: Iterable[Record]) -> Iterable[Metric]:
    for record in records:
        for name, value in record.numbers.items():
            yield Metric(name, value, int(record.time * 1000), record.step)
