"""Comparing a run's metrics with recorded ones."""

from collections.abc import Sequence
from typing import Any

import pytest

from riftco.training import TrainingMetric


def assert_metrics_agree(actual: Sequence[TrainingMetric], recorded: Sequence[dict[str, Any]]) -> None:
    """Phases and steps exact; numbers within 1e-5 relative over the first 10 steps and 1e-3 after."""
    assert [(m.phase, m.step) for m in actual] == [(r["phase"], r["step"]) for r in recorded]
    for metric, expected in zip(actual, recorded, strict=True):
        tolerance = 1e-5 if metric.step <= 10 else 1e-3
        for name in ("loss", "perplexity", "loss_average", "gradient_norm", "clip_scale"):
            value = getattr(metric, name)
            if expected[name] is None:
                assert value is None
            else:
                assert value == pytest.approx(expected[name], rel=tolerance), (name, metric)
