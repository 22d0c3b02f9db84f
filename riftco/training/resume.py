"""A run that can be killed: its state is kept at step boundaries, and the next run goes on from there.

The newest intact checkpoint wins. What is kept is a function of configuration, data and step, so that a run
that was killed any number of times ends with the bytes of one that never was.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from artifacts import ArtifactError, TrainingCheckpoint, Workspace, canonical_json, write_atomic
from artifacts.workspace import METRICS_DIGEST, ResumePoint
from riftco.config import OPERATION, PostTrainingConfig, PretrainingConfig
from riftco.errors import NonFiniteError, TrainingStopped
from riftco.log import LOGGER
from riftco.model import DecoderOnlyTransformer, ModelOptimizer
from riftco.training.batches import BatchSource
from riftco.training.checkpoints import capture, restore
from riftco.training.loop import Optimizer, RunProgress
from riftco.training.metrics import TrainingMetric, decode_metrics, encode_metrics
from riftco.training.stopping import StopRequest

_RUN_DIGEST = "run_sha256"
_ELSEWHERE = {*OPERATION, "processes", "sharding"}


def run_digest(config: PretrainingConfig | PostTrainingConfig, inputs: Mapping[str, str]) -> str:
    """SHA-256 over the settings that decide the way of a run, whatever its length and number of processes,
    and over the digests of what it is made from besides its batches.
    """
    apart = _ELSEWHERE | ({"steps"} if config.schedule == "constant" else set())
    run = {"settings": config.model_dump(mode="json", exclude=apart), "inputs": inputs}
    return hashlib.sha256(canonical_json(run)).hexdigest()


class Checkpointer:
    """Keeps the state of one run in a workspace; a `Boundary` of the training loop."""

    def __init__(
        self,
        workspace: Workspace,
        model: DecoderOnlyTransformer,
        optimizer: Optimizer,
        source: BatchSource,
        config: PretrainingConfig | PostTrainingConfig,
        inputs: Mapping[str, str],
        stop: StopRequest,
    ) -> None:
        self._workspace = workspace
        self._model, self._optimizer, self._source = model, optimizer, source
        self._last, self._run = config.steps, run_digest(config, inputs)
        self._steps, self._seconds = config.checkpoint_steps, 60 * config.checkpoint_minutes
        self._stop = stop
        self._evaluation_interval = config.evaluation_interval
        self._kept_step = 0
        self._kept_at = time.monotonic()
        # Each metric is encoded once; a long run is kept many times.
        self._lines, self._lines_digest, self._encoded = b"", hashlib.sha256(), 0

    def restore(self) -> RunProgress | None:
        """Put back the state of the newest intact checkpoint that fits this run; None if there is none."""
        for point in self._points():
            step = point.checkpoint.global_step
            try:
                self._require_same_run(point.checkpoint)
                self._apply(point.checkpoint)
            except ValueError as error:
                LOGGER.warning("the checkpoint of step %d does not fit this run: %s", step, error)
                continue
            LOGGER.info("going on from the checkpoint of step %d", step)
            self._kept_step = step
            return RunProgress(0, step, list(filter(self._is_ours, decode_metrics(point.metrics))))
        return None

    def validating(self, progress: RunProgress) -> None:
        """TrainingStopped, with the state kept, if that was asked for: who goes on validates first."""
        stop, _ = self._wishes(progress)
        if stop:
            self._stop_at(progress)

    def reached(self, progress: RunProgress) -> None:
        """Keep the state if it is time to; TrainingStopped, with the state kept, if that was asked for."""
        stop, due = self._wishes(progress)
        if stop:
            self._stop_at(progress)
        if due:
            self._keep(progress)

    def interrupted(self, progress: RunProgress) -> None:
        """Keep the state: the run is about to end."""
        self._keep(progress)

    def explained(self, error: NonFiniteError) -> NonFiniteError:
        """The error with the name of a file, written here, that holds its facts."""
        path = self._workspace.folder / f"step-{error.facts['step']}.nonfinite.json"
        try:
            write_atomic(path, json.dumps(error.facts, allow_nan=False).encode() + b"\n")
        except OSError as refused:
            LOGGER.warning("%s could not be written: %s", path, refused)
            return error
        return NonFiniteError(f"{error}; weights, gradients and batch: {path}", error.facts)

    def _points(self) -> Iterator[ResumePoint]:
        return self._workspace.points(_passed_over)

    def _require_same_run(self, checkpoint: TrainingCheckpoint) -> None:
        if checkpoint.metadata.get(_RUN_DIGEST) != self._run:
            raise ValueError("it was kept under other settings or of other inputs")
        if checkpoint.global_step > self._last:
            raise ValueError(f"this run has {self._last} steps")

    def _is_ours(self, metric: TrainingMetric) -> bool:
        """Whether this run takes that measurement; a shorter one also validates after its own last step."""
        step = metric.step
        return metric.phase == "train" or step == self._last or step % self._evaluation_interval == 0

    def _apply(self, checkpoint: TrainingCheckpoint) -> None:
        assert isinstance(self._optimizer, ModelOptimizer)
        restore(checkpoint, self._model, self._optimizer, self._source)

    def _wishes(self, progress: RunProgress) -> tuple[bool, bool]:
        """Whether the run is to stop, and whether it is time to keep its state."""
        due = bool(self._steps) and progress.step % self._steps == 0
        late = bool(self._seconds) and time.monotonic() - self._kept_at >= self._seconds
        return bool(self._stop), due or late

    def _stop_at(self, progress: RunProgress) -> NoReturn:
        self._keep(progress)
        raise TrainingStopped(f"stopped at step {progress.step}; the same command goes on from there")

    def _keep(self, progress: RunProgress) -> None:
        if progress.step > self._kept_step:
            self._save(progress)
            self._kept_step = progress.step
        self._kept_at = time.monotonic()

    def _save(self, progress: RunProgress) -> None:
        assert isinstance(self._optimizer, ModelOptimizer)
        self._write(progress, self._model, self._optimizer)

    def _write(self, progress: RunProgress, model: DecoderOnlyTransformer, optimizer: ModelOptimizer) -> None:
        new = encode_metrics(progress.metrics[self._encoded :])
        self._encoded = len(progress.metrics)
        self._lines += new
        self._lines_digest.update(new)
        checkpoint = capture(
            model,
            optimizer,
            source=self._source,
            global_step=progress.step,
            metadata={METRICS_DIGEST: self._lines_digest.hexdigest(), _RUN_DIGEST: self._run},
        )
        self._workspace.save(checkpoint, self._lines)


def _passed_over(path: Path, error: ArtifactError) -> None:
    LOGGER.warning("%s is damaged (%s); going on from an earlier checkpoint", path.name, error)
