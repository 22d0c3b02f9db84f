"""Where a step at work keeps what a rerun of it goes on from: `work/<step key>` in the store.

Not objects: nothing names them, the next one replaces them, and they have to free their room at once. One
process works on a key at a time, which is its caller's business (`riftco.exclusive`).

    <step>.jsonl        the metrics of the run so far
    <step>.riftckpt     the run at that step; its metadata holds the SHA-256 of the metrics

The metrics are complete on the disk before the checkpoint is, so a checkpoint that can be read has them.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from artifacts.checkpoint import TrainingCheckpoint
from artifacts.disk_errors import reading, writing
from artifacts.errors import ArtifactError, CheckpointError
from artifacts.files import write_atomic

METRICS_DIGEST = "metrics_sha256"
"""The member of a checkpoint's metadata that holds the SHA-256 of the metrics that belong to it."""
_KEPT = 2  # the newest, and one more in case that is damaged


class ResumePoint(NamedTuple):
    """A run between two steps: its checkpoint, and its metrics so far as they were given to `save`."""

    checkpoint: TrainingCheckpoint
    metrics: bytes


class Workspace:
    """The resume points of one step, in a folder that appears with the first of them."""

    def __init__(self, folder: Path, *, sync: bool = True) -> None:
        """With `sync`, a resume point survives a power loss once it is saved."""
        self.folder = folder
        self._sync = sync

    def save(self, checkpoint: TrainingCheckpoint, metrics: bytes) -> None:
        """Keep a resume point, complete or not at all, the one before it, and no other.

        What is newer was passed over, or this run would not be at this step. The metadata must hold the
        metrics' digest. Raises StoreError if the disk refuses.
        """
        assert checkpoint.metadata.get(METRICS_DIGEST) == hashlib.sha256(metrics).hexdigest()
        name = f"{checkpoint.global_step:012d}"
        with writing(self.folder, "folder"):
            for left_by_a_killed_process in self.folder.glob(".*.tmp"):
                left_by_a_killed_process.unlink(missing_ok=True)
            write_atomic(self.folder / f"{name}.jsonl", [metrics], sync=self._sync)
            write_atomic(self.folder / f"{name}.riftckpt", checkpoint.chunks(), sync=self._sync)
            paths = self._checkpoints()
            kept = {path.stem for path in [path for path in paths if path.stem <= name][:_KEPT]}
            for path in [*paths, *self.folder.glob("*.jsonl")]:
                if path.stem not in kept:
                    path.unlink(missing_ok=True)

    def points(self, passed_over: Callable[[Path, ArtifactError], None]) -> Iterator[ResumePoint]:
        """The intact resume points, newest first; the others are told to `passed_over`, with the error."""
        with reading(self.folder, "folder"):
            paths = self._checkpoints()
        for path in paths:
            try:
                yield _read(path)
            except ArtifactError as error:
                passed_over(path, error)

    def clear(self) -> None:
        """Drop all resume points: the step is done. Killed midway it leaves intact ones, the newest last."""
        with writing(self.folder, "folder"), suppress(FileNotFoundError):
            for path in reversed(self._checkpoints()):
                path.unlink()  # before its metrics go
            shutil.rmtree(self.folder)

    def _checkpoints(self) -> list[Path]:
        return sorted(self.folder.glob("*.riftckpt"), reverse=True)


def _read(path: Path) -> ResumePoint:
    with reading(path.parent, "folder"):
        checkpoint = TrainingCheckpoint.load(path)
        try:
            metrics = path.with_suffix(".jsonl").read_bytes()
        except FileNotFoundError:
            raise CheckpointError("metrics", "the metrics that belong to it are gone") from None
    if checkpoint.metadata.get(METRICS_DIGEST) != hashlib.sha256(metrics).hexdigest():
        raise CheckpointError("metrics", "its metrics do not have the SHA-256 it says")
    return ResumePoint(checkpoint, metrics)
