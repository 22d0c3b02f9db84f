"""The learning rate over a run."""

import pytest

from riftco.config import PretrainingConfig
from riftco.training.schedules import learning_rate_schedule


def rates(steps: int, **settings: object) -> list[float]:
    config = PretrainingConfig.model_validate(settings)
    schedule = learning_rate_schedule(config, peak=2.0, steps=steps)
    assert schedule is not None
    return [schedule(step) for step in range(1, steps + 1)]


def test_a_rate_that_never_changes_needs_no_schedule() -> None:
    assert learning_rate_schedule(PretrainingConfig(), peak=2.0, steps=9) is None


def test_warm_up_rises_in_equal_steps_to_the_peak_and_stays() -> None:
    assert rates(6, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_the_cosine_starts_at_the_peak_and_aims_at_zero_one_step_after_the_last() -> None:
    assert rates(4, schedule="cosine") == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5])
    values = rates(100, schedule="cosine", warmup_steps=10)
    assert values[9] == values[10] == 2.0
    assert values[10:] == sorted(values[10:], reverse=True)
    assert 0 < values[-1] < 0.001


def test_a_trapezoid_meets_its_warm_up_at_the_peak_and_aims_at_zero_one_step_after_the_last() -> None:
    values = rates(10, schedule="trapezoid", warmup_steps=6, cooldown_fraction=0.4)
    assert values[5] == 2.0
    assert values[6:] == pytest.approx([1.6, 1.2, 0.8, 0.4])


def test_a_warm_up_that_reaches_into_the_cool_down_falls_from_where_they_meet() -> None:
    values = rates(10, schedule="trapezoid", warmup_steps=6, cooldown_fraction=0.8)
    rising, falling = [2 * step / 6 for step in range(1, 5)], [2 * left / 9 for left in range(6, 0, -1)]
    assert values == pytest.approx(rising + falling)


def test_a_warm_up_longer_than_the_run_never_reaches_the_peak() -> None:
    assert rates(2, schedule="cosine", warmup_steps=4) == [0.5, 1.0]
