"""What the loop measures at each step, and its lines in a run's log."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from artifacts import canonical_json, parse_json


@dataclass(frozen=True, slots=True)
class TrainingMetric:
    """One measurement. Losses are nats per token; the fields after `perplexity` are None in validation.

    `loss` of a train metric is its batch's, before the update; `gradient_norm` is before clipping;
    `token_count` is how many tokens the step learned from.
    """

    phase: Literal["train", "validation"]
    step: int
    loss: float
    perplexity: float
    loss_average: float | None = None
    gradient_norm: float | None = None
    clip_scale: float | None = None
    learning_rate: float | None = None
    token_count: int | None = None


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def encode_metrics(metrics: Iterable[TrainingMetric]) -> bytes:
    """Canonical JSON lines; a perplexity that overflows is null."""
    names = [field.name for field in fields(TrainingMetric)]
    lines = ({name: getattr(metric, name) for name in names} for metric in metrics)
    finite = (line if math.isfinite(line["perplexity"]) else line | {"perplexity": None} for line in lines)
    return b"".join(canonical_json(line) + b"\n" for line in finite)


def decode_metrics(data: bytes) -> list[TrainingMetric]:
    """The metrics that `encode_metrics` wrote."""
    lines = [parse_json(line, what="metric") for line in data.splitlines()]
    return [TrainingMetric(**line | {"perplexity": perplexity(line["loss"])}) for line in lines]
