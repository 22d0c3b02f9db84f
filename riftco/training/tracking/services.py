"""TensorBoard, Weights & Biases and MLflow: only those that `track` names, and never in a run's way.

Each service is fed by a thread of its own. One that is slow, hangs or fails costs the run nothing but a
warning; what it needs to start (its library, its login) is demanded before the run begins.
"""

import contextvars
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from riftco.errors import InputError
from riftco.log import LOGGER

Settings = Mapping[str, Any]
"""The settings of a run as plain JSON values."""


@dataclass(frozen=True, slots=True)
class Record:
    """What one moment of a run has to tell: numbers by name (`train/loss`), or a sample of text."""

    step: int
    time: float
    """Seconds since 1970."""
    numbers: Mapping[str, float]
    text: str | None = None


class TrackingService(Protocol):
    """A place metrics go to. Any exception of these methods ends its part in the run, not the run."""

    def log(self, records: Sequence[Record]) -> None: ...
    def close(self, *, failed: bool) -> None: ...


class Courier:
    """Brings records to one service from a thread, in order, as many at once as have come up."""

    def __init__(self, name: str, service: TrackingService, *, patience: float = 60.0) -> None:
        """`patience`: seconds that `close` waits for a service that is behind."""
        self.name = name
        self._service = service
        self._patience = patience
        self._failed_run = False
        self._gone = threading.Event()
        self._records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        context = contextvars.copy_context()  # a log handler may look there for the run it belongs to
        self._thread = threading.Thread(target=context.run, args=(self._deliver,), daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Hand a record over; returns at once."""
        if not self._gone.is_set():
            self._records.put(record)

    def close(self, *, failed: bool) -> None:
        """Deliver what is left and close the service; `failed` is how the run ended."""
        self._failed_run = failed
        self._records.put(None)
        self._thread.join(self._patience)
        if self._thread.is_alive():
            LOGGER.warning("%s does not answer; what it has not received is lost", self.name)

    def _deliver(self) -> None:
        try:
            while records := self._next_records():
                self._service.log(records)
            self._service.close(failed=self._failed_run)
        except Exception as error:  # whatever a library or its server may come up with
            self._gone.set()
            LOGGER.warning("%s failed, the run goes on without it: %s", self.name, _reason(error))

    def _next_records(self) -> list[Record]:
        """Wait for a record, then take all there are; empty when there are no more to come."""
        records = [self._records.get()]
        while records[-1] is not None:
            try:
                records.append(self._records.get_nowait())
            except queue.Empty:
                break
        if records[-1] is None and len(records) > 1:
            self._records.put(None)  # the end is for the next call to see
        return [record for record in records if record is not None]


def open_services(names: Sequence[str], run: str, folder: Path, settings: Settings) -> list[Courier]:
    """Start the services of these names; InputError says which one cannot start, why and what to do."""
    couriers: list[Courier] = []
    try:
        for name in dict.fromkeys(names):
            couriers.append(Courier(name, _open(name, run, folder, settings)))
    except BaseException:
        for courier in couriers:
            courier.close(failed=True)
        raise
    return couriers


def _open(name: str, run: str, folder: Path, settings: Settings) -> TrackingService:
    try:
        return _opener(name)(run, folder, settings)
    except ImportError as error:
        raise InputError(
            f"track names {name}, but its library is not installed ({error}); "
            f"pip install 'riftco[{_EXTRA[name]}]', or take {name} out of track"
        ) from None
    except Exception as error:
        raise InputError(
            f"track names {name}, which cannot start ({_reason(error)}); mend that, or take it out of track"
        ) from error


def _reason(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


_EXTRA = {"tensorboard": "track", "wandb": "wandb", "mlflow": "mlflow"}


def _opener(name: str) -> Callable[[str, Path, Settings], TrackingService]:
    """The class of a service; its module imports the library, so ImportError says that it is missing."""
    match name:
        case "tensorboard":
            from riftco.training.tracking.event_files import EventFiles

            return EventFiles
        case "wandb":
            from riftco.training.tracking.wandb_run import WandbRun

            return WandbRun
        case "mlflow":
            from riftco.training.tracking.mlflow_run import MlflowRun

            return MlflowRun
    raise AssertionError(f"no tracking service is called {name!r}")
