"""What the leader of launched ranks reports to the process that launched them: lines of JSON in a file.

Each line has one of

    {"log": .., "level": ..}                        a line for the log
    {"metrics": .., "measured": .., "time": ..}     a metric, with what was measured as it came
    {"began": true, "metrics": .., "bytes_per_token": ..}   the run begins, after these metrics
    {"text": .., "step": .., "time": ..}            what the model wrote

Metrics are text as `encode_metrics` writes it. What only the leader can see is measured there, at its time:
lines may be read late, and many at once.
"""

import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from riftco.log import LOGGER
from riftco.training.loop import MetricSink
from riftco.training.metrics import TrainingMetric, decode_metrics, encode_metrics
from riftco.training.tracking import RunTracker, RunWatch
from riftco.training.tracking.watch import Measured

EVENTS = "events.jsonl"


class EventWriter:
    """Appends events to a stream without a buffer, each complete before the next step if the disk has room.

    What it has no room for waits in memory: a disk that refuses does not end a run.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._waiting = bytearray()
        self._refused = False

    def write(self, **event: Any) -> None:
        """One event, of JSON values, after those that wait."""
        self._waiting += json.dumps(event).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as the disk lets us; the first refusal is told on standard error."""
        try:
            while self._waiting:
                del self._waiting[: self._stream.write(self._waiting)]
            self._refused = False
        except OSError as error:
            if not self._refused:  # the log is among what cannot be written
                late = "the run goes on, what it tells comes later"
                print(f"{self._stream.name}: {error.strerror}; {late}", file=sys.stderr, flush=True)
            self._refused = True

    def metric(self, metric: TrainingMetric, measured: Measured, moment: float) -> None:
        """A metric, and what was measured at that moment (seconds since 1970)."""
        self.write(metrics=encode_metrics([metric]).decode(), measured=dict(measured), time=moment)


class EventLog(logging.Handler):
    """Reports the lines of the log."""

    def __init__(self, writer: EventWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.write(log=record.getMessage(), level=record.levelno)


class EventWatch(RunWatch):
    """Measures in the leader, for a tracker in the process that launched it."""

    def __init__(self, writer: EventWriter, sample_steps: int) -> None:
        super().__init__(sample_steps)
        self._writer = writer

    def began(self, bytes_per_token: float | None, earlier: Sequence[TrainingMetric]) -> None:
        self._writer.write(
            began=True, metrics=encode_metrics(earlier).decode(), bytes_per_token=bytes_per_token
        )

    def happened(self, metric: TrainingMetric, measured: Measured, moment: float) -> None:
        self._writer.metric(metric, measured, moment)

    def wrote(self, step: int, text: str, moment: float) -> None:
        self._writer.write(text=text, step=step, time=moment)


def leader_sink(writer: EventWriter, *, tracked: bool, sample_steps: int) -> MetricSink:
    """The metric sink of a leader; nothing is measured that no tracker asks for."""
    if tracked:
        return EventWatch(writer, sample_steps)
    return lambda metric: writer.metric(metric, {}, time.time())


class Events:
    """Reads what the leader reports, as far as it is written."""

    def __init__(self, path: Path, metric_sink: MetricSink | None) -> None:
        """A sink that is a `RunTracker` is told everything, any other the metrics."""
        self._path, self._sink = path, metric_sink
        self._at = 0
        self.step = 0

    def pass_on(self) -> None:
        """Give new metrics to the sink and new lines to the log."""
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._at)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                self._pass_on(json.loads(line))

    def _pass_on(self, event: dict[str, Any]) -> None:
        tracker = self._sink if isinstance(self._sink, RunTracker) else None
        if "log" in event:
            LOGGER.log(event["level"], "%s", event["log"])
        elif "text" in event:
            if tracker:
                tracker.wrote(event["step"], event["text"], event["time"])
        elif "began" in event:
            if tracker:
                tracker.began(event["bytes_per_token"], decode_metrics(event["metrics"].encode()))
        else:
            (metric,) = decode_metrics(event["metrics"].encode())
            self.step = metric.step
            if tracker:
                tracker.happened(metric, event["measured"], event["time"])
            elif self._sink is not None:
                self._sink(metric)
