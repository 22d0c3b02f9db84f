"""The table is whole at any moment, says what it was told, and never ends a run."""

import logging
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from riftco.training.tracking import table
from riftco.training.tracking.table import SCHEMA, MetricTable
from tests.artifacts.children import Child, Say


def row(step: int, **values: Any) -> dict[str, Any]:
    return dict.fromkeys(SCHEMA.names) | {"phase": "train", "step": step, "loss": 1.0 / step} | values


class Watch:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = MetricTable(tmp_path / "run" / "metrics.parquet")
    given = [
        row(1, phase="validation", perplexity=float("inf")),
        row(2, token_count=2**40, learning_rate=1e-3, elapsed_seconds=0.25),
        row(
            3, **{name: 3.0 for name in SCHEMA.names[2:] if name not in ("token_count", "peak_memory_bytes")}
        ),
    ]
    for each in given:
        rows.add(each)
    rows.close()
    found = parquet.read_table(rows.path)
    assert found.schema.equals(SCHEMA)
    assert found.to_pylist() == given


def test_a_row_with_a_column_too_few_or_too_many_is_refused(tmp_path: Path) -> None:
    rows = MetricTable(tmp_path / "metrics.parquet")
    with pytest.raises(AssertionError, match="phase"):
        rows.add({"step": 1})
    with pytest.raises(AssertionError, match="colour"):
        rows.add(row(1, colour="red"))


def test_it_is_written_at_once_then_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    watch = Watch()
    rows = MetricTable(tmp_path / "metrics.parquet", watch)
    seen = []
    for step in range(1, 13):
        rows.add(row(step))
        seen.append(parquet.read_table(rows.path).num_rows)
        watch.now += 1.0
    rows.close()
    assert seen == [1, 1, 1, 1, 1, 6, 6, 6, 6, 6, 11, 11]
    assert parquet.read_table(rows.path)["step"].to_pylist() == list(range(1, 13))


def test_a_slow_disk_is_asked_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, writes = Watch(), []

    def slow(path: Path, *_: object, **__: object) -> None:
        writes.append(watch.now)
        watch.now += 2.0

    monkeypatch.setattr("riftco.training.tracking.table.write_atomic", slow)
    rows = MetricTable(tmp_path / "metrics.parquet", watch)
    for step in range(1, 251):
        rows.add(row(step))
        watch.now += 1.0
    assert writes[1] - writes[0] >= 100
    assert len(writes) == 3


def test_a_full_disk_is_told_once_and_the_rows_are_written_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="riftco")
    watch = Watch()
    in_the_way = tmp_path / "run"
    in_the_way.write_text("a file where the folder should be")
    rows = MetricTable(in_the_way / "metrics.parquet", watch)
    for step in range(1, 4):
        rows.add(row(step))
        watch.now += 10
    rows.close()
    assert len(caplog.messages) == 1
    assert str(rows.path) in caplog.messages[0]
    in_the_way.unlink()
    rows.close()
    assert parquet.read_table(rows.path).num_rows == 3


def test_a_kill_leaves_a_table_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_INTERVAL", 0)
    monkeypatch.setattr(table, "_SHARE", 0)  # it writes all the time
    for kill in range(5):
        path = tmp_path / str(kill) / "metrics.parquet"
        child = Child(partial(write_for_ever, path))
        while not path.exists():
            time.sleep(0.001)
        time.sleep(0.01 * kill)
        child.kill()
        child.wait()
        steps = parquet.read_table(path)["step"].to_pylist()
        assert steps == list(range(1, len(steps) + 1))


def write_for_ever(path: Path, say: Say) -> None:
    rows = MetricTable(path)
    for step in count(1):
        rows.add(row(step))
