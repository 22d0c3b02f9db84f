"""The loop's protocol: which metrics, at which steps, in which order, and when it refuses or stops."""

import math

import pytest
import torch

from artifacts import ModelConfig
from riftco.model import Adam, DecoderOnlyTransformer
from riftco.training import (
    CausalLanguageModelTrainer,
    DocumentRowsBatchSource,
    RandomWindowBatchSource,
    TrainingBatch,
    TrainingLoopConfig,
    TrainingMetric,
    document_batches,
    fixed_batches,
)
from riftco.training.loop import batch_loss, perplexity


def model() -> DecoderOnlyTransformer:
    return DecoderOnlyTransformer(ModelConfig(11, 5, 8, 2, 1, 8, random_seed=1))


def source(seed: int = 0) -> RandomWindowBatchSource:
    return RandomWindowBatchSource(list(range(11)) * 4, batch_size=2, context_size=5, random_seed=seed)


def trainer(learning_rate: float = 0.01) -> CausalLanguageModelTrainer:
    built = model()
    return CausalLanguageModelTrainer(built, Adam(built.base_parameters(), learning_rate))


def phases(metrics: tuple[TrainingMetric, ...]) -> list[tuple[str, int]]:
    return [(metric.phase, metric.step) for metric in metrics]


def test_validation_comes_before_training_at_each_interval_and_at_the_end() -> None:
    metrics = trainer().train(
        source(), TrainingLoopConfig(5, evaluation_interval=2), validation_batches=fixed_batches(source(1), 2)
    )
    assert phases(metrics) == [
        ("validation", 0),
        ("train", 1),
        ("train", 2),
        ("validation", 2),
        ("train", 3),
        ("train", 4),
        ("validation", 4),
        ("train", 5),
        ("validation", 5),
    ]


def test_the_last_step_at_an_interval_is_validated_once() -> None:
    metrics = trainer().train(
        source(), TrainingLoopConfig(2, evaluation_interval=2), validation_batches=fixed_batches(source(1), 1)
    )
    assert phases(metrics) == [("validation", 0), ("train", 1), ("train", 2), ("validation", 2)]


def test_without_validation_batches_there_are_only_train_metrics() -> None:
    assert phases(trainer().train(source(), TrainingLoopConfig(2))) == [("train", 1), ("train", 2)]


def test_steps_go_on_from_the_optimizers_count() -> None:
    subject = trainer()
    subject.train(source(), TrainingLoopConfig(3))
    metrics = subject.train(
        source(), TrainingLoopConfig(2, evaluation_interval=4), validation_batches=fixed_batches(source(1), 1)
    )
    assert phases(metrics) == [
        ("validation", 3),
        ("train", 4),
        ("validation", 4),
        ("train", 5),
        ("validation", 5),
    ]


def test_train_metrics_hold_the_loss_before_the_update_and_a_sliding_mean() -> None:
    subject = trainer()
    first = source().next_batch()
    before = batch_loss(subject.model, first).item()
    metrics = subject.train(source(), TrainingLoopConfig(5, loss_average_window=3))
    losses = [metric.loss for metric in metrics]
    assert losses[0] == before
    expected = [sum(losses[max(0, i - 2) : i + 1]) / min(3, i + 1) for i in range(5)]
    assert [metric.loss_average for metric in metrics] == pytest.approx(expected, rel=1e-12)
    for metric in metrics:
        assert metric.perplexity == math.exp(metric.loss)
        assert metric.gradient_norm is not None
        assert metric.clip_scale == min(1.0, 1 / metric.gradient_norm)


def test_the_loss_of_a_ragged_batch_is_that_of_all_its_parts() -> None:
    rows = [list(range(length)) for length in (2, 3, 4, 5, 6) * 8]
    ragged = DocumentRowsBatchSource(rows, batch_size=40, context_size=5, random_seed=0)
    subject = trainer()
    (batch,) = document_batches(rows, batch_size=40, context_size=5)
    assert len(list(batch.parts())) > 1
    before = batch_loss(subject.model, batch).item()
    (metric,) = subject.train(ragged, TrainingLoopConfig(1))
    assert metric.loss == pytest.approx(before, rel=1e-6)


def test_validation_is_the_plain_mean_of_batch_losses_and_changes_nothing() -> None:
    subject = trainer()
    small, large = source(1).next_batch(), TrainingBatch.shifted(torch.arange(6).repeat(4, 1))
    expected = (batch_loss(subject.model, small).item() + batch_loss(subject.model, large).item()) / 2
    weights = [p.clone() for p in subject.model.parameters()]
    assert subject.evaluate([small, large]) == pytest.approx(expected, rel=1e-12)
    assert all(now.equal(then) for now, then in zip(subject.model.parameters(), weights, strict=True))
    assert all(p.grad is None for p in subject.model.parameters())
    metric = subject.train(source(), TrainingLoopConfig(1), validation_batches=[small, large])[0]
    assert (metric.loss, metric.loss_average, metric.gradient_norm, metric.clip_scale) == (
        expected,
        None,
        None,
        None,
    )
    with pytest.raises(ValueError, match="no batches"):
        subject.evaluate([])


def test_each_metric_reaches_the_sink_as_it_happens() -> None:
    subject = trainer()
    seen: list[tuple[TrainingMetric, int]] = []
    metrics = subject.train(
        source(),
        TrainingLoopConfig(3, evaluation_interval=2),
        validation_batches=fixed_batches(source(1), 1),
        metric_sink=lambda metric: seen.append((metric, subject.optimizer.step_count)),
    )
    assert tuple(metric for metric, _ in seen) == metrics
    assert all(metric.step == count for metric, count in seen)


def test_the_same_seed_gives_the_same_bits() -> None:
    runs = [trainer() for _ in range(2)]
    metrics = [run.train(source(), TrainingLoopConfig(4)) for run in runs]
    assert metrics[0] == metrics[1]
    for left, right in zip(*(run.model.parameters() for run in runs), strict=True):
        assert left.equal(right)


def test_gradients_of_one_step_do_not_reach_the_next() -> None:
    stale, fresh = trainer(), trainer()
    batch_loss(stale.model, source(1).next_batch()).backward()
    assert stale.train(source(), TrainingLoopConfig(1)) == fresh.train(source(), TrainingLoopConfig(1))


def test_the_schedule_sets_the_rate_of_each_step() -> None:
    rates: list[float] = []
    subject = trainer()
    subject.optimizer.step_count = 10  # type: ignore[misc]

    def record(metric: TrainingMetric) -> None:
        rates.append(subject.optimizer.learning_rate)

    subject.train(source(), TrainingLoopConfig(3), schedule=lambda step: step / 1000, metric_sink=record)
    assert rates == [0.011, 0.012, 0.013]


def test_what_the_sink_raises_ends_the_run_between_steps() -> None:
    subject = trainer()

    def refuse_the_second(metric: TrainingMetric) -> None:
        if metric.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        subject.train(source(), TrainingLoopConfig(5), metric_sink=refuse_the_second)
    assert subject.optimizer.step_count == 2


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"token_embedding\.weight is not this model's"):
        CausalLanguageModelTrainer(model(), Adam(model().base_parameters()))


@pytest.mark.parametrize("name", ["steps", "evaluation_interval", "loss_average_window"])
def test_counts_must_be_positive_integers(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        TrainingLoopConfig(**{"steps": 1, name: 0})
    with pytest.raises(TypeError, match=name):
        TrainingLoopConfig(**{"steps": 1, name: True})


def test_a_diverged_run_fails_instead_of_reporting_nan() -> None:
    subject = trainer()
    with torch.no_grad():
        subject.model.language_model_head.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="learning rate"):
        subject.train(source(), TrainingLoopConfig(1))


def test_perplexity_overflows_to_infinity() -> None:
    assert perplexity(1000.0) == math.inf
