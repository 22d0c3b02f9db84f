"""The training loop: batches in, metrics out, one optimiser step at a time."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from kernels import NonFiniteUpdateError
from riftco.errors import NonFiniteError
from riftco.log import LOGGER
from riftco.model import AdamStepStats, DecoderOnlyTransformer, next_token_loss
from riftco.training.batches import BatchSource, TrainingBatch, at_least
from riftco.training.metrics import TrainingMetric, perplexity

MetricSink = Callable[[TrainingMetric], None]
Accumulate = Callable[[DecoderOnlyTransformer, Sequence[TrainingBatch]], Tensor]
_MOST_SKIPPED_IN_A_ROW = 10


class Optimizer(Protocol):
    """What the loop asks of an optimiser: the contract's Adam, or anything shaped like it."""

    learning_rate: float

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...
    @property
    def step_count(self) -> int: ...
    def step(self) -> AdamStepStats: ...
    def zero_gradients(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainingLoopConfig:
    """How many steps to take, how often to look, how many batches make a step, what NaN does to a run."""

    steps: int
    evaluation_interval: int = 10
    loss_average_window: int = 10
    accumulation_steps: int = 1
    nonfinite: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        for name in ("steps", "evaluation_interval", "loss_average_window", "accumulation_steps"):
            at_least(1, getattr(self, name), name)


@dataclass(slots=True)
class RunProgress:
    """How far a run is: the step it began after, the steps behind it, skipped ones included, its metrics."""

    first: int
    step: int
    metrics: list[TrainingMetric] = field(default_factory=list)

    @property
    def skipped_in_a_row(self) -> int:
        """How many steps were skipped since the last that was taken."""
        taken = (metric.step for metric in reversed(self.metrics) if metric.phase == "train")
        return self.step - next(taken, self.first)


class Boundary(Protocol):
    """Whoever keeps the state of a run between two steps."""

    def validating(self, progress: RunProgress) -> None:
        """A validation is due, which may take long. What this raises ends the run before it."""

    def reached(self, progress: RunProgress) -> None:
        """The run is between two steps, all measured. What this raises ends it."""

    def interrupted(self, progress: RunProgress) -> None:
        """The run is about to end, between two steps, by an exception of the metric sink."""


class CausalLanguageModelTrainer:
    """Trains a model with an optimiser that owns parameters of that very model."""

    def __init__(
        self, model: DecoderOnlyTransformer, optimizer: Optimizer, accumulation: Accumulate | None = None
    ) -> None:
        """`accumulation` gives a step's loss and gradients, as `accumulate` does in one process."""
        own = {id(parameter) for parameter in model.parameters()}
        for name, parameter in optimizer.parameters.items():
            if id(parameter) not in own:
                raise ValueError(f"the optimizer's {name} is not this model's; build it from this model")
        self.model = model
        self.optimizer = optimizer
        self._accumulate = accumulation or accumulate

    def train(
        self,
        source: BatchSource,
        config: TrainingLoopConfig,
        *,
        validation_batches: Sequence[TrainingBatch] = (),
        schedule: Callable[[int], float] | None = None,
        metric_sink: MetricSink | None = None,
        progress: RunProgress | None = None,
        boundary: Boundary | None = None,
    ) -> tuple[TrainingMetric, ...]:
        """Take `config.steps` steps and return every metric, in order; each also goes to the sink at once.

        With validation batches they are scored first, after each step divisible by the interval, and after
        the last. `schedule` gives the learning rate of a step (from 1). `progress` is where an earlier run
        was left, whose state model, optimiser and source have again: its metrics are returned too, and the
        sink sees the new ones. What sink or `boundary` raises ends the run between two steps.

        A step whose loss or gradient is not finite changes nothing. NonFiniteError then, unless
        `config.nonfinite` is "skip", fewer than ten such steps came in a row and not all were such; a skipped
        step is told in the log, counts as a step, has no metric, and its batches are spent. A validation loss
        that is not finite is a NonFiniteError too.
        """
        progress = progress or RunProgress(self.optimizer.step_count, self.optimizer.step_count)
        last = progress.first + config.steps

        def record(metric: TrainingMetric) -> None:
            progress.metrics.append(metric)
            try:
                if metric_sink is not None:
                    metric_sink(metric)
            except BaseException:
                if boundary is not None:
                    boundary.interrupted(progress)
                raise

        while True:
            if validation_batches and _is_validation_due(progress, last, config):
                if boundary is not None:
                    boundary.validating(progress)
                record(self._validate(validation_batches, progress.step))
            if boundary is not None:
                boundary.reached(progress)
            if progress.step >= last:
                return tuple(progress.metrics)
            if schedule is not None:
                self.optimizer.learning_rate = schedule(progress.step + 1)
            batches = [source.next_batch() for _ in range(config.accumulation_steps)]
            if metric := self._step(batches, progress, config):
                record(metric)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[TrainingBatch]) -> float:
        """The plain mean of the batches' losses; ValueError without batches."""
        if not batches:
            raise ValueError("there are no batches to evaluate")
        return sum(float(batch_loss(self.model, batch)) for batch in batches) / len(batches)

    def _validate(self, batches: Sequence[TrainingBatch], step: int) -> TrainingMetric:
        loss = self.evaluate(batches)
        if not math.isfinite(loss):
            message = f"the validation loss at step {step} is {loss}; lower the learning rate"
            raise NonFiniteError(message, self._facts(batches, step, loss))
        return TrainingMetric("validation", step, loss, perplexity(loss))

    def _step(
        self, batches: Sequence[TrainingBatch], progress: RunProgress, config: TrainingLoopConfig
    ) -> TrainingMetric | None:
        """One step of the optimiser; None if it was skipped."""
        try:
            loss, stats = self._update(batches, progress.step + 1)
        except NonFiniteError as error:
            skipped = progress.skipped_in_a_row + 1
            if config.nonfinite == "raise" or skipped in (config.steps, _MOST_SKIPPED_IN_A_ROW):
                raise
            self.optimizer.zero_gradients()
            progress.step += 1
            LOGGER.warning("%s; the step is skipped, %d in a row", error, skipped)
            return None
        progress.step += 1
        earlier = (metric.loss for metric in reversed(progress.metrics) if metric.phase == "train")
        recent = [*reversed(list(islice(earlier, config.loss_average_window - 1))), loss]
        return TrainingMetric(
            "train",
            progress.step,
            loss,
            perplexity(loss),
            loss_average=sum(recent) / len(recent),
            gradient_norm=stats.gradient_norm,
            clip_scale=stats.clip_scale,
            learning_rate=self.optimizer.learning_rate,
            token_count=sum(batch.counted for batch in batches),
        )

    def _update(self, batches: Sequence[TrainingBatch], step: int) -> tuple[float, AdamStepStats]:
        self.optimizer.zero_gradients()
        loss = self._accumulate(self.model, batches).item()
        try:
            if not math.isfinite(loss):
                raise NonFiniteUpdateError(
                    f"the loss is {loss}; nothing was updated. Lower the learning rate"
                )
            return loss, self.optimizer.step()
        except NonFiniteUpdateError as error:
            raise NonFiniteError(f"step {step}: {error}", self._facts(batches, step, loss)) from error

    def _facts(self, batches: Sequence[TrainingBatch], step: int, loss: float) -> dict[str, Any]:
        """What somebody needs who asks why a step was not finite; what is not is None."""
        gradients = {name: p.grad for name, p in self.optimizer.parameters.items() if p.grad is not None}
        return {
            "step": step,
            "loss": _finite(loss),
            "learning_rate": self.optimizer.learning_rate,
            "largest_weights": {n: _largest(p.detach()) for n, p in self.optimizer.parameters.items()},
            "largest_gradients": {name: _largest(gradient) for name, gradient in gradients.items()},
            "inputs": [batch.inputs.tolist() for batch in batches],
        }


def accumulate(model: DecoderOnlyTransformer, batches: Sequence[TrainingBatch]) -> Tensor:
    """The mean loss over all counted targets of the batches, whose gradient is added to the parameters'.

    Every target weighs the same, in whatever batch it is, so that k batches give the gradient of one that
    holds all their rows. Returns a float32 scalar on the model's device.
    """
    total = sum(batch.counted for batch in batches)
    loss = torch.zeros((), device=model.device)
    for batch in batches:
        for share in loss_shares(model, batch, total):
            share.backward()
            loss += share.detach()
    return loss


def batch_loss(model: DecoderOnlyTransformer, batch: TrainingBatch) -> Tensor:
    """Mean cross-entropy over the targets that count, a float32 scalar on the model's device."""
    return torch.stack(list(loss_shares(model, batch, batch.counted))).sum()


def loss_shares(
    model: DecoderOnlyTransformer, batch: TrainingBatch, total: int, *, cut: bool = True
) -> Iterator[Tensor]:
    """The shares of a batch's parts in the mean loss over `total` targets, which add up to the batch's.

    Flash attention skips what other documents hold, so a ragged batch is one part without padding under it.
    Under materialized attention it is cut into rectangles, or, without `cut`, padded.
    """
    if model.attention == "flash":
        parts: Iterable[TrainingBatch] = (batch.flat(),)
    else:
        parts = batch.parts() if cut else (batch,)
    for part in parts:
        mask, starts = (
            None if tensor is None else tensor.to(model.device)
            for tensor in (part.mask, part.document_starts)
        )
        targets = part.targets.to(model.device)
        loss = next_token_loss(model, part.inputs, targets, mask, document_starts=starts)
        yield loss * (part.counted / total)


def _is_validation_due(progress: RunProgress, last: int, config: TrainingLoopConfig) -> bool:
    step = progress.step
    if step not in (progress.first, last) and step % config.evaluation_interval:
        return False
    newest = progress.metrics[-1] if progress.metrics else None
    return newest is None or (newest.phase, newest.step) != ("validation", step)


def _largest(tensor: Tensor) -> float | None:
    return _finite(tensor.abs().max().item())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
