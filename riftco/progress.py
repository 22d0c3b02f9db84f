"""What a person sees of long work: a live bar on a terminal, a line now and then in a log.

A line of the log has the same columns as the one before, so that numbers can be compared down the page:

    pretrain   120/750  loss 1.2345  lr 3.0e-03  norm 0.71     12,345 tok/s  matrix  31 %     412 MiB
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from riftco.log import LOGGER

ReportProgress = Callable[[str, int, int, Mapping[str, float]], None]
"""Is told a title, the units of work done and in all, and numbers worth showing."""

_FORMS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {_fixed(value, 6)}",
    "validation_loss": lambda value: f"val {_fixed(value, 6)}",
    "learning_rate": lambda value: f"lr {value:7.1e}",
    "gradient_norm": lambda value: f"norm {_fixed(value, 4)}",
    "tokens_per_second": lambda value: f"{value:9,.0f} tok/s",
    "matrix_fraction": lambda value: f"matrix {100 * value:3.0f} %",
    "peak_memory_bytes": lambda value: f"{value / 2**20:7,.0f} MiB",
}
"""How known numbers are shown, each in a width that does not change; others as `name value`."""
_NOT_ON_BAR = {"validation_loss", "learning_rate", "gradient_norm", "matrix_fraction", "peak_memory_bytes"}


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
        shown = {name: value for name, value in numbers.items() if name not in _NOT_ON_BAR}
        self._progress.update(self._task, completed=done, numbers=_shown(shown))
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
        """Log how far it is and the numbers, if it is time to."""
        now = time.monotonic()
        if now - self._last.setdefault(title, now) >= self._interval:
            self._last[title] = now
            LOGGER.info("%s", f"{title:<10} {done:>{len(str(total))}}/{total}  {_shown(numbers)}".rstrip())


def _shown(numbers: Mapping[str, float]) -> str:
    parts = (
        _FORMS[name](value) if name in _FORMS else f"{name.replace('_', ' ')} {value:.4g}"
        for name, value in numbers.items()
    )
    return "  ".join(parts)


def _fixed(value: float, width: int) -> str:
    """A number >= 0 with as many decimals as fit in `width` characters; the point moves, the end does not."""
    whole = len(f"{value:.0f}")
    return f"{value:{width}.{max(0, width - 1 - whole)}f}"


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
