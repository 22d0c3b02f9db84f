"""Runs that are killed, stopped or damaged: what comes out in the end is what would have come out anyway."""

import hashlib
import json
import logging
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts import ModelBundle, TrainingCheckpoint, Workspace
from riftco.config import LoraConfig, PostTrainingConfig, PretrainingConfig
from riftco.data import InstructionExample
from riftco.errors import NonFiniteError, TrainingStopped
from riftco.training import TrainingMetric, post_train, pretrain_splits, pretrain_text
from riftco.training.metrics import encode_metrics
from tests.artifacts.children import Child, Say
from tests.support import FIXTURES

STEPS = 24
TEXT = "".join(
    f"the {a} saw the {b}.\n\n" for a in ("owl", "fox", "hen") for b in ("cat", "dog", "hat", "sun")
)
EXAMPLES = [
    InstructionExample(f"Who saw the {a}?", f"The {b} did.") for a in ("owl", "fox") for b in ("hen", "cat")
]
PRETRAINING = PretrainingConfig(
    backend="cpu",
    steps=STEPS,
    context_size=12,
    validation_batch_count=1,
    checkpoint_steps=3,
    optimizer="muon",
    schedule="cosine",
    warmup_steps=4,
    sampling_strategy="document_rows",
)
TUNING = PostTrainingConfig(backend="cpu", steps=STEPS, context_size=12, checkpoint_steps=3)
LORA = LoraConfig(rank=2)


def pretrained(workspace: Workspace | None, sink: Callable[[TrainingMetric], None] | None = None) -> Any:
    return pretrain_text(TEXT, PRETRAINING, workspace=workspace, metric_sink=sink)


def tuned(
    workspace: Workspace | None,
    sink: Callable[[TrainingMetric], None] | None = None,
    validation: list[InstructionExample] | None = None,
    **settings: Any,
) -> Any:
    base = ModelBundle.load(FIXTURES / "bpe.rift")
    config = TUNING.model_copy(update=settings)
    return post_train(
        base, EXAMPLES, config, validation=validation or (), workspace=workspace, metric_sink=sink
    )


RUNS: dict[str, Callable[..., Any]] = {
    "pretraining, Muon": pretrained,
    "full, Adam": tuned,
    "LoRA, AdamW": partial(
        tuned, validation=EXAMPLES[:2], fine_tuning_method="lora", lora=LORA, optimizer="adamw"
    ),
    "QLoRA, paged Adam": partial(tuned, fine_tuning_method="qlora", lora=LORA),
    "packed, accumulated": partial(tuned, sampling_strategy="packed", accumulation_steps=2),
}


def outcome(run: Callable[..., Any], folder: Path) -> dict[str, str]:
    """Digests of everything that a run leaves: its last checkpoint, its log, its bundle."""
    workspace = Workspace(folder, sync=False)
    result = run(workspace)
    (newest, *_) = workspace.points(lambda path, error: pytest.fail(str(error)))
    assert newest.checkpoint.global_step == STEPS
    assert newest.metrics == encode_metrics(result.metrics)
    found = {
        "checkpoint": newest.checkpoint.checkpoint_id,
        "metrics": hashlib.sha256(newest.metrics).hexdigest(),
        "bundle": result.bundle.artifact_id,
    }
    workspace.clear()
    return found


@pytest.fixture
def one_thread():
    """In a forked process the threads of its parent's pool are gone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kills", [5, pytest.param(400, marks=pytest.mark.soak)], ids=["quick", "full"])
def test_a_run_killed_anywhere_leaves_the_bytes_of_one_that_was_not(
    tmp_path: Path, one_thread: None, name: str, kills: int
) -> None:
    run, chance = RUNS[name], random.Random(name)

    def job(say: Say) -> None:
        random.seed(5)
        say(outcome(run, tmp_path / "killed"))

    started = time.monotonic()
    (expected,) = Child(job).wait()
    assert set(expected) == {"checkpoint", "metrics", "bundle"}, expected
    duration = time.monotonic() - started
    killed = finished = 0
    while killed < kills or not finished:
        child = Child(job)
        time.sleep(chance.uniform(0, duration if killed < kills else 60 * duration))
        child.kill()
        said = child.wait()
        killed += not said
        finished += bool(said)
        assert all(found == expected for found in said), said


def test_the_state_is_kept_when_the_sink_interrupts(tmp_path: Path) -> None:
    whole = pretrained(None)
    workspace = Workspace(tmp_path / "work", sync=False)

    def interrupt(metric: TrainingMetric) -> None:
        if metric.step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrained(workspace, interrupt)
    assert [p.checkpoint.global_step for p in workspace.points(lambda *_: None)] == [7, 6]
    seen: list[TrainingMetric] = []
    again = pretrained(workspace, seen.append)
    assert again.metrics == whole.metrics
    assert again.bundle.artifact_id == whole.bundle.artifact_id
    assert seen[0].step == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_at_the_next_step_with_its_state_kept(tmp_path: Path, number: int) -> None:
    workspace = Workspace(tmp_path / "work", sync=False)
    delivered: list[int] = []
    before = signal.signal(number, lambda number, frame: delivered.append(number))

    def send(metric: TrainingMetric) -> None:
        if metric.phase == "train" and metric.step == 4:
            os.kill(os.getpid(), number)

    try:
        with pytest.raises(TrainingStopped, match="stopped at step 4; the same command goes on"):
            pretrained(workspace, send)
    finally:
        signal.signal(number, before)
    assert delivered == [number]
    assert next(workspace.points(lambda *_: None)).checkpoint.global_step == 4


@pytest.mark.parametrize("step", [10, STEPS])
def test_a_stop_does_not_wait_for_a_validation_which_is_made_up_for(tmp_path: Path, step: int) -> None:
    whole = pretrained(None)
    workspace = Workspace(tmp_path / "work", sync=False)
    seen: list[TrainingMetric] = []

    def send(metric: TrainingMetric) -> None:
        seen.append(metric)
        if metric.phase == "train" and metric.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(TrainingStopped, match=f"stopped at step {step};"):
            pretrained(workspace, send)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (seen[-1].phase, seen[-1].step) == ("train", step)
    again = pretrained(workspace, seen.append)
    assert tuple(seen) == again.metrics == whole.metrics
    assert again.bundle.artifact_id == whole.bundle.artifact_id


def test_a_damaged_checkpoint_is_named_and_an_earlier_one_wins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = Workspace(tmp_path / "work", sync=False)
    whole = pretrained(workspace)
    newest = workspace.folder / f"{STEPS:012d}.riftckpt"
    data = bytearray(newest.read_bytes())
    data[-50] ^= 1
    newest.chmod(0o600)
    newest.write_bytes(data)
    seen: list[TrainingMetric] = []
    with caplog.at_level(logging.INFO, "riftco"):
        again = pretrained(workspace, seen.append)
    assert f"{newest.name} is damaged" in caplog.text
    assert "going on from the checkpoint of step 21" in caplog.text
    assert seen[0].step == 22
    assert again.bundle.artifact_id == whole.bundle.artifact_id


def test_a_checkpoint_of_another_run_is_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = Workspace(tmp_path / "work", sync=False)
    tuned(workspace)
    whole = tuned(None, batch_size=3)
    with caplog.at_level(logging.INFO, "riftco"):
        other = tuned(workspace, batch_size=3)
    assert f"the checkpoint of step {STEPS} does not fit this run" in caplog.text
    assert other.bundle.artifact_id == whole.bundle.artifact_id


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 6},
        {"accumulation_steps": 2},
        {"schedule": "cosine"},
        {"nonfinite": "skip"},
        {"precision": "bf16"},
    ],
)
def test_a_checkpoint_kept_under_other_settings_is_passed_over_and_does_not_stay_in_the_way(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    workspace = Workspace(tmp_path / "work", sync=False)
    tuned(workspace)
    seen: list[TrainingMetric] = []

    def interrupt(metric: TrainingMetric) -> None:
        seen.append(metric)
        if metric.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(workspace, interrupt, **settings)
    assert seen[0].step == 1
    again: list[TrainingMetric] = []
    tuned(workspace, again.append, **settings)
    assert again[0].step == 6


def test_a_checkpoint_of_another_base_is_passed_over(tmp_path: Path) -> None:
    one = ModelBundle.load(FIXTURES / "bpe.rift")
    other = ModelBundle.load(FIXTURES / "bpe-lora-child.rift")
    workspace = Workspace(tmp_path / "work", sync=False)
    post_train(one, EXAMPLES, TUNING, workspace=workspace)
    assert post_train(other, EXAMPLES, TUNING, workspace=workspace) == post_train(other, EXAMPLES, TUNING)


def test_a_checkpoint_of_another_validation_text_is_passed_over(tmp_path: Path) -> None:
    config = PRETRAINING.model_copy(update={"steps": 6})
    workspace = Workspace(tmp_path / "work", sync=False)
    pretrain_splits(TEXT, "the owl saw the owl.", config, workspace=workspace)
    again = pretrain_splits(TEXT, "the sun saw the owl.", config, workspace=workspace)
    assert again == pretrain_splits(TEXT, "the sun saw the owl.", config)


def test_a_checkpoint_beside_other_validation_examples_is_passed_over(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", sync=False)
    tuned(workspace, validation=EXAMPLES[:1])
    assert tuned(workspace, validation=EXAMPLES[1:]) == tuned(None, validation=EXAMPLES[1:])


def test_more_steps_at_a_constant_rate_go_on_from_fewer(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", sync=False)
    tuned(workspace, steps=6)
    assert tuned(workspace, steps=9).metrics == tuned(None, steps=9).metrics


def test_more_steps_do_not_keep_the_last_validation_of_fewer(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", sync=False)

    def run(steps: int, workspace: Workspace | None) -> Any:
        config = PRETRAINING.model_copy(update={"schedule": "constant", "steps": steps})
        return pretrain_text(TEXT, config, workspace=workspace)

    run(6, workspace)
    extended, whole = run(12, workspace), run(12, None)
    assert extended.metrics == whole.metrics
    assert extended.bundle.artifact_id == whole.bundle.artifact_id


def test_each_metric_is_encoded_once_however_often_the_state_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[TrainingMetric] = []

    def noted(metrics: list[TrainingMetric]) -> bytes:
        encoded.extend(metrics)
        return encode_metrics(metrics)

    monkeypatch.setattr("riftco.training.resume.encode_metrics", noted)
    workspace = Workspace(tmp_path / "work", sync=False)
    result = tuned(workspace, checkpoint_steps=1)
    assert tuple(encoded) == result.metrics
    assert next(workspace.points(lambda *_: None)).metrics == encode_metrics(result.metrics)


def test_a_diagnostic_that_cannot_be_written_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr("riftco.training.resume.write_atomic", refuse)
    with pytest.raises(NonFiniteError, match=r"^step \d+: "):
        tuned(Workspace(tmp_path / "work", sync=False), learning_rate=1e30)
    assert "could not be written" in caplog.text


def test_checkpoints_are_due_by_steps_or_by_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("riftco.training.resume.time.monotonic", lambda: 30.0 * next(clock))
    saved: list[int] = []
    save = Workspace.save

    def noted(self: Workspace, checkpoint: TrainingCheckpoint, metrics: bytes) -> None:
        saved.append(checkpoint.global_step)
        save(self, checkpoint, metrics)

    monkeypatch.setattr(Workspace, "save", noted)
    workspace = Workspace(tmp_path / "work", sync=False)
    tuned(workspace, steps=9, checkpoint_steps=0, checkpoint_minutes=0.0)
    assert saved == []
    tuned(workspace, steps=9, checkpoint_steps=4, checkpoint_minutes=0.0)
    assert saved == [4, 8]
    saved.clear()
    workspace.clear()
    tuned(workspace, steps=9, checkpoint_steps=0, checkpoint_minutes=1.5)  # three ticks, one at each step
    assert saved == [2, 5, 8]


def test_a_step_that_is_not_finite_leaves_a_file_that_says_why(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", sync=False)
    with pytest.raises(NonFiniteError, match=r"step \d+: .*nonfinite\.json") as caught:
        tuned(workspace, learning_rate=1e30)
    (path,) = workspace.folder.glob("*.nonfinite.json")
    facts = json.loads(path.read_text())
    assert facts == caught.value.facts
    assert str(path) in str(caught.value)
