"""What a person sees of long work: a live bar on a terminal, a line now and then in a log."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from riftco.log import LOGGER, log_to_terminal

if TYPE_CHECKING:
    from riftco.training import TrainingMetric

ReportProgress = Callable[[str, int, int, Mapping[str, float]], None]
"""Is told a title, the units of work done and in all, and numbers worth showing."""


@contextmanager
def show_progress() -> Iterator[ReportProgress]:
    """A bar on standard error if that is a terminal, else log lines."""
    if not sys.stderr.isatty():
        yield ProgressLog()
        return
    bar = ProgressBar()
    try:
        yield bar
    finally:
        bar.close()


@contextmanager
def show_training(title: str, steps: int) -> Iterator[Callable[["TrainingMetric"], None]]:
    """A metric sink that shows the steps of one training run."""
    log_to_terminal()
    with show_progress() as report:

        def sink(metric: "TrainingMetric") -> None:
            if metric.phase == "train" and metric.loss_average is not None:
                report(title, metric.step, steps, {"loss": metric.loss_average})

        yield sink


class ProgressBar:
    """One bar at a time; it appears with the first unit of a title and is gone after the last."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __call__(self, title: str, done: int, total: int, numbers: Mapping[str, float]) -> None:
        if self._progress is None:
            self._progress = _columns()
            self._task = self._progress.add_task(title, total=total, numbers="")
            self._progress.start()
        text = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        self._progress.update(self._task, completed=done, numbers=text)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Take the bar away and give the terminal back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class ProgressLog:
    """Writes progress to the log, for each title at most one line in `interval` seconds."""

    def __init__(self, interval: float = 10.0) -> None:
        self._interval = interval
        self._last: dict[str, float] = {}

    def __call__(self, title: str, done: int, total: int, numbers: Mapping[str, float]) -> None:
        """Log `pretrain: 120 of 400, loss 1.25`, if it is time to."""
        now = time.monotonic()
        if now - self._last.setdefault(title, now) >= self._interval:
            self._last[title] = now
            values = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items())
            LOGGER.info("%s: %d of %d%s", title, done, total, values)


def _columns() -> Progress:
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
