"""The way of a run's metrics: each to the table, the display and the services asked for; samples as well.

    with show_progress() as report:
        with open_tracking(config, run="book", folder=folder, report=partial(report, "pretrain")) as tracker:
            pretrain_text(text, config, metric_sink=tracker)

Of many processes that share a run, one tracks it. Where the run is in processes that it launched, the
tracker stays with the caller and is told what a `RunWatch` sees there.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from riftco.config import OPERATION, PostTrainingConfig, PretrainingConfig
from riftco.log import LOGGER
from riftco.training.metrics import TrainingMetric
from riftco.training.ranks import is_leader
from riftco.training.tracking.samples import SampleFile
from riftco.training.tracking.services import Courier, Record, open_services
from riftco.training.tracking.watch import Measured, RunWatch

ReportNumbers = Callable[[int, int, Mapping[str, float]], None]
"""Is told steps done, steps in all, and numbers worth showing. What it raises ends the run between steps."""

TABLE, SAMPLES = "metrics.parquet", "samples.jsonl"
_SHOWN = ("loss_average", "learning_rate", "gradient_norm", "tokens_per_second", "matrix_fraction")


@contextmanager
def open_tracking(
    config: PretrainingConfig | PostTrainingConfig, *, run: str, folder: Path, report: ReportNumbers
) -> Iterator["RunTracker"]:
    """A metric sink for one run: `metrics.parquet`, `samples.jsonl` and event files appear in the folder.

    `run` names it for the services. InputError when a service that `config.track` names cannot start. On
    leaving, the table is complete and the services have all they can be given. On a rank that does not lead,
    whose sink sees no metric, nothing is opened and nothing appears.
    """
    from riftco.training.tracking.table import MetricTable  # pyarrow takes half a second

    samples = SampleFile(folder / SAMPLES, config.sample_prompt)
    if not is_leader():
        yield RunTracker(config, lambda row: None, samples, (), report)
        return
    settings = config.model_dump(mode="json", exclude=set(OPERATION))
    couriers = open_services(config.track, run, folder, settings)
    table = MetricTable(folder / TABLE)
    failed = True
    try:
        yield RunTracker(config, table.add, samples, couriers, report)
        failed = False
    finally:
        table.close()
        for courier in couriers:
            courier.close(failed=failed)


class RunTracker(RunWatch):
    """Takes every metric of a run, in order."""

    def __init__(
        self,
        config: PretrainingConfig | PostTrainingConfig,
        add_row: Callable[[Mapping[str, str | float | None]], None],
        samples: SampleFile,
        couriers: Sequence[Courier],
        report: ReportNumbers,
    ) -> None:
        super().__init__(config.sample_steps)
        self._config = config
        self._add_row = add_row
        self._samples = samples
        self._couriers = couriers
        self._report = report
        self._bytes_per_token: float | None = None
        self._validation_loss: float | None = None

    def began(self, bytes_per_token: float | None, earlier: Sequence[TrainingMetric]) -> None:
        """Tell the earlier metrics again, without their pace, which only their own process knew.

        So each process of a run leaves a record of the whole run. A disk that refuses does not end the run.
        """
        self._bytes_per_token = bytes_per_token
        for metric in earlier:
            self._tell(metric, {}, time.time())
        last = earlier[-1].step if earlier else 0
        try:
            self._samples.begin(last)
        except OSError as error:
            LOGGER.warning("samples of an earlier run stay after step %d: %s", last, error)

    def happened(self, metric: TrainingMetric, measured: Measured, moment: float) -> None:
        """Tell a metric, and show it."""
        row = self._tell(metric, measured, moment)
        if metric.phase == "validation":
            self._validation_loss = metric.loss
        else:
            self._show(metric, row)

    def wrote(self, step: int, text: str, moment: float) -> None:
        """Tell a sample. A disk that keeps none does not end the run."""
        LOGGER.info("step %d writes %r", step, self._config.sample_prompt + text)
        try:
            self._samples.add(step, text)
        except OSError as error:
            LOGGER.warning("no sample at step %d: %s", step, error)
        else:
            self._send(Record(step, moment, {}, self._config.sample_prompt + text))

    def _tell(
        self, metric: TrainingMetric, measured: Measured, moment: float
    ) -> dict[str, str | float | None]:
        """Bring a metric to the table and the services; returns its row."""
        bytes_per_token = self._bytes_per_token
        row: dict[str, str | float | None] = {
            "phase": metric.phase,
            "step": metric.step,
            "loss": metric.loss,
            "bits_per_byte": metric.loss / math.log(2) / bytes_per_token if bytes_per_token else None,
            "perplexity": metric.perplexity,
            "loss_average": metric.loss_average,
            "gradient_norm": metric.gradient_norm,
            "clip_scale": metric.clip_scale,
            "learning_rate": metric.learning_rate,
            "token_count": metric.token_count,
        }
        for name in ("tokens_per_second", "matrix_fraction", "peak_memory_bytes", "elapsed_seconds"):
            row[name] = measured.get(name)
        self._add_row(row)
        apart = ("step", "elapsed_seconds")  # every service has axes of its own for these
        numbers = {
            f"{metric.phase}/{name}": float(value)
            for name, value in row.items()
            if isinstance(value, int | float) and name not in apart
        }
        self._send(Record(metric.step, moment, numbers))
        return row

    def _show(self, metric: TrainingMetric, row: Mapping[str, str | float | None]) -> None:
        values = {name: row[name] for name in _SHOWN} | {"peak_memory_bytes": row["peak_memory_bytes"]}
        shown = {"loss": values.pop("loss_average"), "validation_loss": self._validation_loss, **values}
        numbers = {name: float(value) for name, value in shown.items() if value is not None}
        self._report(metric.step, self._config.steps, numbers)

    def _send(self, record: Record) -> None:
        for courier in self._couriers:
            courier.put(record)
