"""One training run as a stage's configuration describes it: policies, optimiser, schedule, resumption."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import nn

from artifacts import Workspace
from riftco.config import PostTrainingConfig, PretrainingConfig
from riftco.errors import NonFiniteError
from riftco.model import DecoderOnlyTransformer
from riftco.training.batches import BatchSource, TrainingBatch
from riftco.training.loop import (
    Accumulate,
    CausalLanguageModelTrainer,
    MetricSink,
    Optimizer,
    TrainingLoopConfig,
    accumulate,
)
from riftco.training.metrics import TrainingMetric
from riftco.training.optimizers import build_optimizer
from riftco.training.resume import Checkpointer
from riftco.training.schedules import learning_rate_schedule
from riftco.training.stopping import StopRequest, deferred_signals


@dataclass(frozen=True, slots=True)
class RunParts:
    """What of a run depends on whether this process has it alone or shares it with others."""

    model: DecoderOnlyTransformer
    optimizer: Optimizer
    accumulate: Accumulate
    checkpointer: Callable[..., Checkpointer]
    """Takes what `Checkpointer` takes."""
    leads: bool
    """Whether metrics are this process's to report."""


def run_training(
    model: DecoderOnlyTransformer,
    parameters: Mapping[str, nn.Parameter],
    source: BatchSource,
    config: PretrainingConfig | PostTrainingConfig,
    *,
    inputs: Mapping[str, str],
    validation_batches: Sequence[TrainingBatch] = (),
    metric_sink: MetricSink | None = None,
    begin: Callable[[Sequence[TrainingMetric]], None] | None = None,
    workspace: Workspace | None = None,
) -> tuple[TrainingMetric, ...]:
    """Train these parameters of a model in place; returns every metric in order.

    `inputs`: digests by name of what the run is made from besides its batches, such as the base model; a
    checkpoint made from others is passed over.

    With a workspace the run goes on from the newest intact checkpoint there, keeps its own, and ends between
    two steps on SIGINT or SIGTERM (TrainingStopped, unless the signal's own handler raises); the sink sees
    only what is new, and before it `begin` is told the metrics so far. NonFiniteError names the file, in the
    workspace, that says what was not finite.
    """
    model.attention = config.attention
    model.activation_checkpointing = config.activation_checkpointing
    model.precision = config.precision
    if config.compile:
        model.compile_blocks()
    loop = TrainingLoopConfig(
        config.steps,
        config.evaluation_interval,
        config.loss_average_window,
        config.accumulation_steps,
        config.nonfinite,
    )
    schedule = learning_rate_schedule(config, peak=config.learning_rate, steps=config.steps)
    signals = deferred_signals() if workspace else nullcontext(StopRequest())
    with _parts(model, parameters, config) as run, signals as stop:
        facts = (run.model, run.optimizer, source, config, inputs, stop)
        keeper = run.checkpointer(workspace, *facts) if workspace else None
        progress = keeper.restore() if keeper else None
        if begin is not None and run.leads:
            begin(progress.metrics if progress else ())
        try:
            return CausalLanguageModelTrainer(run.model, run.optimizer, run.accumulate).train(
                source,
                loop,
                validation_batches=validation_batches,
                schedule=schedule,
                metric_sink=metric_sink if run.leads else None,
                progress=progress,
                boundary=keeper,
            )
        except NonFiniteError as error:
            if keeper is None:
                raise
            raise keeper.explained(error) from None


@contextmanager
def _parts(
    model: DecoderOnlyTransformer,
    parameters: Mapping[str, nn.Parameter],
    config: PretrainingConfig | PostTrainingConfig,
) -> Iterator[RunParts]:
    if config.processes > 1:
        from riftco.training.rank_run import rank_run

        with rank_run(model, parameters, config) as parts:
            yield parts
        return
    with build_optimizer(parameters, config) as optimizer:
        yield RunParts(model, optimizer, accumulate, Checkpointer, leads=True)
