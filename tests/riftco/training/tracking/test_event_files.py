"""Event files hold what was logged, framed as TensorBoard reads them; its own reader agrees where it is."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from riftco.training.tracking.services import Record, open_services

pytest.importorskip("tensorboardX", reason="the extra `track` is not installed")


def events(folder: Path) -> Iterator[Any]:
    """The events of a folder's files: length, its checksum, bytes, their checksum (the TFRecord framing)."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            head, (size, crc) = data[:8], struct.unpack("<QI", data[:12])
            body, tail = data[12 : 12 + size], data[12 + size : 16 + size]
            assert crc == masked(head)
            assert tail == struct.pack("<I", masked(body))
            yield Event.FromString(body)
            data = data[16 + size :]


def write(folder: Path, *records: Record) -> None:
    (courier,) = open_services(["tensorboard"], "book", folder, {"steps": 7, "lora": {"rank": 4}})
    for record in records:
        courier.put(record)
    courier.close(failed=False)


def test_numbers_and_samples_come_back(tmp_path: Path) -> None:
    numbers = {"train/loss": 1.5, "train/perplexity": float("inf"), "train/token_count": 4096.0}
    write(tmp_path, Record(3, 12.5, numbers), Record(4, 13.0, {}, "\nZoë\n# was"))
    version, start, settings, point, sample = events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (0, start.session_log.START)
    (said,) = settings.summary.value
    assert said.tag == "settings/text_summary"
    assert b'"lora": {"rank": 4}' in said.tensor.string_val[0]
    assert (point.step, point.wall_time) == (3, 12.5)
    assert {value.tag: value.simple_value for value in point.summary.value} == numbers
    (text,) = sample.summary.value
    assert (sample.step, text.tag, text.metadata.plugin_data.plugin_name) == (
        4,
        "sample/text_summary",
        "text",
    )
    assert text.tensor.string_val[0].decode() == "    \n    Zoë\n    # was"


def test_records_are_in_the_file_while_the_run_goes_on(tmp_path: Path) -> None:
    import time

    (courier,) = open_services(["tensorboard"], "book", tmp_path, {})
    courier.put(Record(1, 0.0, {"train/loss": 2.0}))
    deadline = time.monotonic() + 10
    while len(list(events(tmp_path))) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list(events(tmp_path))) == 4
    courier.close(failed=True)


def test_tensorboards_own_reader_sees_the_newest_run_alone(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path, *(Record(step, 1.0, {"train/loss": 9.0}) for step in range(1, 8)))
    (old,) = (tmp_path / "tensorboard").iterdir()
    old.rename(old.with_name("events.out.tfevents.0000000000.earlier"))
    write(tmp_path, *(Record(step, 2.0, {"train/loss": float(step)}) for step in range(1, 4)))
    accumulator = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(each.step, each.value) for each in accumulator.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 3)]
