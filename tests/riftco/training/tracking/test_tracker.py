"""A run's metrics on all their ways: table, display, services, samples. Only who watches may end a run."""

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch

from riftco.config import PretrainingConfig
from riftco.errors import InputError
from riftco.training import TrainingMetric
from riftco.training.tracking import RunFacts, open_tracking, tracker
from riftco.training.tracking.services import Courier, Record
from tests.riftco.training.tracking.support import forget
from tests.riftco.training.tracking.test_samples import lines

CONFIG = PretrainingConfig(steps=10, sample_steps=4, sample_prompt="Zoë")
Report = list[tuple[int, int, dict[str, float]]]


def facts(**values: Any) -> RunFacts:
    known = {
        "device": torch.device("cpu"),
        "flops_per_token": 1e3,
        "matrix_limit": 1e9,
        "bytes_per_token": 2.5,
        "sampler": None,
    }
    return RunFacts(**known | values)


def trained(step: int) -> TrainingMetric:
    return TrainingMetric("train", step, 2.0, math.exp(2.0), 1.75, 0.5, 1.0, 3e-3, 100)


def validated(step: int) -> TrainingMetric:
    return TrainingMetric("validation", step, 3.0, math.exp(3.0))


class Notebook:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.failed: bool | None = None

    def log(self, records: Sequence[Record]) -> None:
        self.records += records

    def close(self, *, failed: bool) -> None:
        self.failed = failed


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    service = Notebook()
    monkeypatch.setattr(tracker, "open_services", lambda *_: [Courier("notebook", service)])
    return service


def rows(folder: Path) -> list[dict[str, Any]]:
    return parquet.read_table(folder / "metrics.parquet").to_pylist()


def track(
    folder: Path, *metrics: TrainingMetric, config: Any = CONFIG, begin: Any = (), **known: Any
) -> Report:
    seen: Report = []

    def report(done: int, total: int, numbers: Mapping[str, float]) -> None:
        seen.append((done, total, dict(numbers)))

    with open_tracking(config, run="book", folder=folder, report=report) as tracking:
        tracking.begin(facts(**known), begin)
        for metric in metrics:
            time.sleep(0.002)
            tracking(metric)
    return seen


def test_every_metric_is_a_row_with_what_the_moment_says(tmp_path: Path) -> None:
    track(tmp_path, validated(0), trained(1), validated(1))
    first, train, last = rows(tmp_path)
    assert (first["phase"], first["step"], first["loss"]) == ("validation", 0, 3.0)
    assert first["bits_per_byte"] == pytest.approx(3.0 / math.log(2) / 2.5)
    assert first["tokens_per_second"] is None
    assert first["peak_memory_bytes"] is None
    told = {
        n: train[n] for n in ("loss_average", "gradient_norm", "clip_scale", "learning_rate", "token_count")
    }
    assert told == {
        "loss_average": 1.75,
        "gradient_norm": 0.5,
        "clip_scale": 1.0,
        "learning_rate": 3e-3,
        "token_count": 100,
    }
    assert 0 < train["tokens_per_second"] < 100 / 0.002
    assert train["matrix_fraction"] == pytest.approx(train["tokens_per_second"] * 1e3 / 1e9)
    assert train["peak_memory_bytes"] > 1 << 20
    assert 0 <= first["elapsed_seconds"] < train["elapsed_seconds"] < last["elapsed_seconds"] < 10


def test_validation_and_the_handling_of_a_metric_are_not_in_the_pace(tmp_path: Path) -> None:
    def slow_sampler(step: int) -> str:
        time.sleep(0.3)
        return "text"

    with open_tracking(CONFIG, run="book", folder=tmp_path, report=lambda *_: None) as tracking:
        tracking.begin(facts(sampler=slow_sampler))
        tracking(validated(0))
        for step in range(1, 9):
            tracking(trained(step))
            time.sleep(0.3 if step % 4 == 3 else 0)
            if step % 4 == 3:
                tracking(validated(step))
    assert rows(tmp_path)[-1]["tokens_per_second"] > 800 / 0.25


def test_without_bytes_per_token_there_are_no_bits_per_byte(tmp_path: Path) -> None:
    track(tmp_path, trained(1), bytes_per_token=None)
    assert rows(tmp_path)[0]["bits_per_byte"] is None


def test_the_display_gets_steps_and_the_numbers_worth_showing(tmp_path: Path) -> None:
    seen = track(tmp_path, trained(1), validated(1), trained(2))
    assert [(done, total) for done, total, _ in seen] == [(1, 10), (2, 10)]
    assert seen[0][2].keys() == {"loss", "learning_rate", "gradient_norm", "peak_memory_bytes"}
    assert list(seen[1][2]) == [
        "loss",
        "validation_loss",
        "learning_rate",
        "gradient_norm",
        "tokens_per_second",
        "matrix_fraction",
        "peak_memory_bytes",
    ]
    assert (seen[1][2]["loss"], seen[1][2]["validation_loss"]) == (1.75, 3.0)


def test_services_get_every_number_under_its_phase(tmp_path: Path, notebook: Notebook) -> None:
    track(tmp_path, validated(0), trained(1), config=PretrainingConfig(steps=10))
    validation, train = notebook.records
    assert set(validation.numbers) == {
        "validation/loss",
        "validation/bits_per_byte",
        "validation/perplexity",
    }
    assert train.numbers["train/loss"] == 2.0
    assert train.numbers["train/token_count"] == 100.0
    assert {"train/tokens_per_second", "train/matrix_fraction", "train/peak_memory_bytes"} <= set(
        train.numbers
    )
    assert "train/step" not in train.numbers
    assert (validation.step, train.step, notebook.failed) == (0, 1, False)
    assert abs(train.time - time.time()) < 10


def test_a_resumed_run_tells_its_past_again_without_a_pace(tmp_path: Path, notebook: Notebook) -> None:
    past = [validated(0), trained(1), trained(2)]
    track(tmp_path, trained(3), begin=past)
    assert [(row["phase"], row["step"]) for row in rows(tmp_path)] == [
        ("validation", 0),
        ("train", 1),
        ("train", 2),
        ("train", 3),
    ]
    for row in rows(tmp_path)[:3]:
        for name in ("tokens_per_second", "matrix_fraction", "peak_memory_bytes", "elapsed_seconds"):
            assert row[name] is None
    assert rows(tmp_path)[1]["learning_rate"] == 3e-3
    assert rows(tmp_path)[1]["bits_per_byte"] is not None
    assert rows(tmp_path)[3]["peak_memory_bytes"] is not None
    assert [record.step for record in notebook.records] == [0, 1, 2, 3]


def test_samples_go_to_log_file_and_services(
    tmp_path: Path, notebook: Notebook, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="riftco")
    metrics = [validated(0), *map(trained, range(1, 10)), validated(8)]
    track(tmp_path, *metrics, sampler=lambda step: f" was {step}\x1b[2J")
    assert lines(tmp_path / "samples.jsonl") == [
        {"step": step, "prompt": "Zoë", "text": f" was {step}\x1b[2J"} for step in (4, 8)
    ]
    assert [(r.step, r.text) for r in notebook.records if r.text] == [
        (4, "Zoë was 4\x1b[2J"),
        (8, "Zoë was 8\x1b[2J"),
    ]
    (said,) = [message for message in caplog.messages if message.startswith("step 4")]
    assert said == "step 4 writes 'Zoë was 4\\x1b[2J'"  # nothing that a terminal would obey


def test_a_resumed_run_keeps_the_samples_before_it(tmp_path: Path) -> None:
    track(tmp_path, *map(trained, range(1, 10)), sampler=str)
    track(tmp_path, trained(7), trained(8), begin=[trained(6)], sampler=lambda step: "again")
    assert [(s["step"], s["text"]) for s in lines(tmp_path / "samples.jsonl")] == [(4, "4"), (8, "again")]
    track(tmp_path, trained(1), sampler=str)
    assert not (tmp_path / "samples.jsonl").exists()


def test_a_disk_that_lets_no_samples_be_dropped_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("full")

    track(tmp_path, *map(trained, range(1, 10)), sampler=str)
    monkeypatch.setattr("riftco.training.tracking.samples.write_atomic", full)
    track(tmp_path, trained(7), begin=[trained(6)], sampler=str)
    assert "samples of an earlier run stay after step 6: full" in caplog.messages
    assert [row["step"] for row in rows(tmp_path)] == [6, 7]


@pytest.mark.parametrize(
    "error", [ValueError("logits must be finite"), RuntimeError("busy"), OSError("full")]
)
def test_a_sample_that_cannot_be_had_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def sampler(step: int) -> str:
        raise error

    track(tmp_path, *map(trained, range(1, 6)), sampler=sampler)
    assert f"no sample at step 4: {error}" in caplog.messages
    assert len(rows(tmp_path)) == 5


def test_who_watches_may_end_the_run_and_nothing_is_lost(tmp_path: Path, notebook: Notebook) -> None:
    def report(done: int, total: int, numbers: Mapping[str, float]) -> None:
        if done == 2:
            raise KeyboardInterrupt

    def run() -> None:
        with open_tracking(CONFIG, run="book", folder=tmp_path, report=report) as tracking:
            tracking(trained(1))
            tracking(trained(2))

    with pytest.raises(KeyboardInterrupt):
        run()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert [record.step for record in notebook.records] == [1, 2]
    assert notebook.failed is True


def test_before_the_facts_are_known_metrics_count_without_them(tmp_path: Path) -> None:
    with open_tracking(CONFIG, run="book", folder=tmp_path, report=lambda *_: None) as tracking:
        for step in range(1, 5):
            tracking(trained(step))
    assert rows(tmp_path)[3]["tokens_per_second"] > 0
    assert rows(tmp_path)[3]["matrix_fraction"] is None


def test_a_service_that_is_missing_ends_it_before_anything_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    forget(monkeypatch, "event_files")
    config = PretrainingConfig(track=("tensorboard",))
    with (
        pytest.raises(InputError, match=r"riftco\[track\]"),
        open_tracking(config, run="book", folder=tmp_path, report=lambda *_: None),
    ):
        raise AssertionError("the run began")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_lead_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    config = CONFIG.model_copy(update={"track": ("tensorboard",)})
    with open_tracking(config, run="book", folder=tmp_path / "run", report=lambda *_: None):
        pass
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "0")
    with open_tracking(config, run="book", folder=tmp_path / "run", report=lambda *_: None) as tracking:
        tracking(trained(1))
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]


def test_services_are_told_the_settings_that_make_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(tracker, "open_services", lambda *arguments: asked.append(arguments) or [])
    track(tmp_path, config=PretrainingConfig(steps=7, track=("mlflow",)))
    names, run, folder, settings = asked[0]
    assert (names, run, folder, settings["steps"]) == (("mlflow",), "book", tmp_path, 7)
    assert "track" not in settings
