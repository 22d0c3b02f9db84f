"""What a run of several ranks does otherwise than one process: how it adds up, and how it keeps its state.

Everything that decides the way of a run is the same on every rank: the numbers of a step are sums over all
of them, and whether to stop or to keep the state is asked of all at each boundary. Only the leader, rank 0,
calls the sink and touches the workspace.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from artifacts import TrainingCheckpoint
from artifacts.workspace import ResumePoint
from riftco.config import PostTrainingConfig, PretrainingConfig
from riftco.errors import NonFiniteError
from riftco.model import DecoderOnlyTransformer
from riftco.training.checkpoints import restore
from riftco.training.loop import RunProgress
from riftco.training.optimizers import build_optimizer
from riftco.training.ranks import Ranks, joined
from riftco.training.resume import Checkpointer
from riftco.training.run import RunParts


@contextmanager
def rank_run(
    model: DecoderOnlyTransformer,
    parameters: Mapping[str, nn.Parameter],
    config: PretrainingConfig | PostTrainingConfig,
) -> Iterator[RunParts]:
    """The parts of a run that this process shares; on leaving, every rank's model has the trained values."""
    with joined(model.device) as ranks:
        if config.sharding == "none":
            with build_optimizer(parameters, config) as optimizer:
                keeper = partial(RankCheckpointer, ranks)
                yield RunParts(model, optimizer, ranks.accumulate, keeper, ranks.leader)
            return
        from riftco.training.sharding import ShardedModel

        sharded = ShardedModel(model, parameters, config, ranks)
        checkpointer = partial(ShardedCheckpointer, sharded, ranks)
        yield RunParts(sharded.twin, sharded.optimizer, sharded.accumulate, checkpointer, ranks.leader)
        sharded.finish()


class RankCheckpointer(Checkpointer):
    """Keeps and restores the state of a run whose ranks all have the whole of it."""

    def __init__(self, ranks: Ranks, *run: Any) -> None:
        super().__init__(*run)
        self._ranks = ranks
        self._alone = False

    def interrupted(self, progress: RunProgress) -> None:
        """Keep the state: the leader's sink ends the run. The others end when they miss the leader."""
        self._alone = True
        super().interrupted(progress)

    def explained(self, error: NonFiniteError) -> NonFiniteError:
        """As in one process, on the leader; no rank ends before the file is there."""
        explained = super().explained(error) if self._ranks.leader else error
        self._ranks.wait()
        return explained

    def _points(self) -> Iterator[ResumePoint]:
        """The leader's resume points, on every rank: each tries one, and all agree whether it fits."""
        if not self._ranks.leader:
            while data := self._ranks.from_leader():
                yield ResumePoint(TrainingCheckpoint.from_bytes(data), self._ranks.from_leader())
            return
        for point in super()._points():
            self._ranks.from_leader(point.checkpoint.to_bytes())
            self._ranks.from_leader(point.metrics)
            yield point
        self._ranks.from_leader(b"")

    def _wishes(self, progress: RunProgress) -> tuple[bool, bool]:
        """What any rank wishes: signals and clocks are its own."""
        stop, due = self._ranks.any(*super()._wishes(progress))
        return stop, due

    def _save(self, progress: RunProgress) -> None:
        if self._ranks.leader:
            super()._save(progress)
        if not self._alone:
            self._ranks.wait()


class ShardedCheckpointer(RankCheckpointer):
    """Keeps and restores the state of a run whose ranks have a part of it each."""

    def __init__(self, sharded: Any, ranks: Ranks, *run: Any) -> None:
        super().__init__(ranks, *run)
        self._sharded = sharded

    def interrupted(self, progress: RunProgress) -> None:
        """Nothing: one rank cannot gather the state of all. The last checkpoint stays."""

    def _apply(self, checkpoint: TrainingCheckpoint) -> None:
        with self._sharded.whole_optimizer() as optimizer:
            restore(checkpoint, self._sharded.whole, optimizer, self._source)
            self._sharded.load(optimizer.state())

    def _save(self, progress: RunProgress) -> None:
        state = self._sharded.state()
        if state is not None:
            with self._sharded.whole_optimizer() as optimizer:
                optimizer.load_state(state)
                self._write(progress, self._sharded.whole, optimizer)
        self._ranks.wait()
