"""What reaches a service, in order; and that no service can hold up or end a run."""

import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from riftco.errors import InputError
from riftco.training.tracking.services import Courier, Record, open_services
from tests.riftco.training.tracking.support import forget


class Notebook:
    """A service that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.batches: list[int] = []
        self.closed: list[bool] = []

    def log(self, records: Sequence[Record]) -> None:
        self.batches.append(len(records))
        self.records += records

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


def record(step: int) -> Record:
    return Record(step, 0.0, {"train/loss": 1.0})


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="riftco")
    return caplog


@pytest.mark.parametrize("failed", [False, True])
def test_all_records_arrive_in_order_before_the_end(failed: bool) -> None:
    notebook = Notebook()
    courier = Courier("notebook", notebook)
    for step in range(500):
        courier.put(record(step))
    courier.close(failed=failed)
    assert [each.step for each in notebook.records] == list(range(500))
    assert notebook.closed == [failed]


def test_a_service_that_is_behind_gets_many_records_at_once() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Notebook):
        def log(self, records: Sequence[Record]) -> None:
            super().log(records)
            begun.set()
            go_on.wait()

    slow = Slow()
    courier = Courier("slow", slow)
    courier.put(record(0))
    begun.wait()
    for step in range(1, 100):
        courier.put(record(step))
    go_on.set()
    courier.close(failed=False)
    assert slow.batches == [1, 99]


def test_a_service_that_fails_is_told_once_and_left_alone(warnings: pytest.LogCaptureFixture) -> None:
    class Broken(Notebook):
        def log(self, records: Sequence[Record]) -> None:
            super().log(records)
            raise ConnectionError("no route to host\nand a page more")

    broken = Broken()
    courier = Courier("broken", broken)
    courier.put(record(1))
    while courier._thread.is_alive():
        time.sleep(0.001)
    courier.put(record(2))
    assert courier._records.empty()  # nothing piles up
    courier.close(failed=False)
    assert [each.step for each in broken.records] == [1]
    assert broken.closed == []
    assert warnings.messages == [
        "broken failed, the run goes on without it: ConnectionError: no route to host"
    ]


def test_a_service_that_cannot_close_is_only_told(warnings: pytest.LogCaptureFixture) -> None:
    class Stuck(Notebook):
        def close(self, *, failed: bool) -> None:
            raise OSError("disk full")

    Courier("stuck", Stuck()).close(failed=False)
    assert warnings.messages == ["stuck failed, the run goes on without it: OSError: disk full"]


def test_a_service_that_hangs_keeps_nobody_waiting(warnings: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    class Hanging(Notebook):
        def log(self, records: Sequence[Record]) -> None:
            release.wait()

    courier = Courier("hanging", Hanging(), patience=0.05)
    start = time.monotonic()
    for step in range(100):
        courier.put(record(step))
    assert time.monotonic() - start < 1
    courier.close(failed=False)
    assert warnings.messages == ["hanging does not answer; what it has not received is lost"]
    release.set()


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [("tensorboard", "tensorboardX", "track"), ("wandb", "wandb", "wandb"), ("mlflow", "mlflow", "mlflow")],
)
def test_a_missing_library_names_the_extra_that_brings_it(
    name: str, library: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {"tensorboard": "event_files", "wandb": "wandb_run", "mlflow": "mlflow_run"}[name]
    forget(monkeypatch, ours)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=rf"track names {name}.*pip install 'riftco\[{extra}\]'"):
        open_services([name], "book", tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_a_service_that_cannot_start_says_why_and_closes_those_that_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = Notebook()

    def opener(name: str) -> object:
        def start(*_: object) -> Notebook:
            if name == "wandb":
                raise PermissionError("no API key\nread the manual")
            return notebook

        return start

    monkeypatch.setattr("riftco.training.tracking.services._opener", opener)
    with pytest.raises(InputError, match=r"track names wandb, .*PermissionError: no API key\); mend that"):
        open_services(["mlflow", "wandb"], "book", tmp_path, {})
    assert notebook.closed == [True]


def test_a_service_named_twice_is_started_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("riftco.training.tracking.services._opener", lambda name: lambda *_: Notebook())
    couriers = open_services(["mlflow", "mlflow", "wandb"], "book", tmp_path, {})
    assert [courier.name for courier in couriers] == ["mlflow", "wandb"]
    for courier in couriers:
        courier.close(failed=False)
    assert open_services([], "book", tmp_path, {}) == []
