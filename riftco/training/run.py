"""One training run as a stage's configuration describes it: policies, optimiser, schedule, loop."""

from collections.abc import Mapping, Sequence

from torch import nn

from riftco.config import PostTrainingConfig, PretrainingConfig
from riftco.model import DecoderOnlyTransformer
from riftco.training.batches import BatchSource, TrainingBatch
from riftco.training.loop import CausalLanguageModelTrainer, MetricSink, TrainingLoopConfig, TrainingMetric
from riftco.training.optimizers import build_optimizer
from riftco.training.schedules import learning_rate_schedule


def run_training(
    model: DecoderOnlyTransformer,
    parameters: Mapping[str, nn.Parameter],
    source: BatchSource,
    config: PretrainingConfig | PostTrainingConfig,
    *,
    validation_batches: Sequence[TrainingBatch] = (),
    metric_sink: MetricSink | None = None,
) -> tuple[TrainingMetric, ...]:
    """Train these parameters of a model in place with a fresh optimiser; returns every metric in order."""
    model.attention = config.attention
    model.activation_checkpointing = config.activation_checkpointing
    return CausalLanguageModelTrainer(model, build_optimizer(parameters, config)).train(
        source,
        TrainingLoopConfig(config.steps, config.evaluation_interval, config.loss_average_window),
        validation_batches=validation_batches,
        schedule=learning_rate_schedule(config, peak=config.learning_rate, steps=config.steps),
        metric_sink=metric_sink,
    )
