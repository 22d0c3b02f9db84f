"""The training loop: batches in, metrics out, one optimiser step at a time."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from riftco.model import AdamStepStats, DecoderOnlyTransformer, next_token_loss
from riftco.training.batches import BatchSource, TrainingBatch, at_least

MetricSink = Callable[["TrainingMetric"], None]


class Optimizer(Protocol):
    """What the loop asks of an optimiser: the contract's Adam, or anything shaped like it."""

    learning_rate: float
    parameters: dict[str, nn.Parameter]

    @property
    def step_count(self) -> int: ...
    def step(self) -> AdamStepStats: ...
    def zero_gradients(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainingLoopConfig:
    """How many steps to take, and how often to look."""

    steps: int
    evaluation_interval: int = 10
    loss_average_window: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "evaluation_interval", "loss_average_window"):
            at_least(1, getattr(self, name), name)


@dataclass(frozen=True, slots=True)
class TrainingMetric:
    """One measurement. Losses are nats per token; the last three fields are None in validation.

    `loss` of a train metric is its batch's, before the update; `gradient_norm` is before clipping.
    """

    phase: Literal["train", "validation"]
    step: int
    loss: float
    perplexity: float
    loss_average: float | None = None
    gradient_norm: float | None = None
    clip_scale: float | None = None


class CausalLanguageModelTrainer:
    """Trains a model with an optimiser that owns parameters of that very model."""

    def __init__(self, model: DecoderOnlyTransformer, optimizer: Optimizer) -> None:
        own = {id(parameter) for parameter in model.parameters()}
        for name, parameter in optimizer.parameters.items():
            if id(parameter) not in own:
                raise ValueError(f"the optimizer's {name} is not this model's; build it from this model")
        self.model = model
        self.optimizer = optimizer

    def train(
        self,
        source: BatchSource,
        config: TrainingLoopConfig,
        *,
        validation_batches: Sequence[TrainingBatch] = (),
        schedule: Callable[[int], float] | None = None,
        metric_sink: MetricSink | None = None,
    ) -> tuple[TrainingMetric, ...]:
        """Take `config.steps` steps and return every metric, in order; each also goes to the sink at once.

        With validation batches they are scored first, after each optimiser step divisible by the interval,
        and after the last. `schedule` gives the learning rate of an optimiser step (from 1). What the sink
        raises ends the run between two steps.
        """
        metrics: list[TrainingMetric] = []

        def record(metric: TrainingMetric) -> None:
            metrics.append(metric)
            if metric_sink is not None:
                metric_sink(metric)

        if validation_batches:
            record(self._validation_metric(validation_batches))
        recent = deque[float](maxlen=config.loss_average_window)
        last = self.optimizer.step_count + config.steps
        while (step := self.optimizer.step_count) < last:
            if schedule is not None:
                self.optimizer.learning_rate = schedule(step + 1)
            loss, stats = self._step(source.next_batch())
            recent.append(loss)
            average = sum(recent) / len(recent)
            record(_metric("train", stats.step, loss, average, stats.gradient_norm, stats.clip_scale))
            if validation_batches and (stats.step % config.evaluation_interval == 0 or stats.step == last):
                record(self._validation_metric(validation_batches))
        return tuple(metrics)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[TrainingBatch]) -> float:
        """The plain mean of the batches' losses; ValueError without batches."""
        if not batches:
            raise ValueError("there are no batches to evaluate")
        return sum(float(batch_loss(self.model, batch)) for batch in batches) / len(batches)

    def _step(self, batch: TrainingBatch) -> tuple[float, AdamStepStats]:
        self.optimizer.zero_gradients()
        loss = torch.zeros((), device=self.model.device)
        for share in _loss_shares(self.model, batch):
            share.backward()  # gradients add up over the parts
            loss += share.detach()
        stats = self.optimizer.step()
        return loss.item(), stats  # read after the step, so that a GPU is never waited for in between

    def _validation_metric(self, batches: Sequence[TrainingBatch]) -> TrainingMetric:
        return _metric("validation", self.optimizer.step_count, self.evaluate(batches))


def batch_loss(model: DecoderOnlyTransformer, batch: TrainingBatch) -> Tensor:
    """Mean cross-entropy over the targets that count, a float32 scalar on the model's device."""
    return torch.stack(list(_loss_shares(model, batch))).sum()


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _loss_shares(model: DecoderOnlyTransformer, batch: TrainingBatch) -> Iterator[Tensor]:
    """The shares of a batch's parts in its mean loss: their sum is the mean over all counted targets."""
    for part in batch.parts():
        mask = None if part.mask is None else part.mask.to(model.device)
        loss = next_token_loss(model, part.inputs, part.targets.to(model.device), mask)
        yield loss * (part.counted / batch.counted)


def _metric(phase: Literal["train", "validation"], step: int, loss: float, *rest: float) -> TrainingMetric:
    return TrainingMetric(phase, step, loss, perplexity(loss), *rest)
