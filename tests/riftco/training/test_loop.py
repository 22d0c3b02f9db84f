"""The loop's protocol: which metrics, at which steps, in which order, and when it refuses or stops."""

import math

import pytest
import torch

from artifacts import ModelConfig
from riftco.errors import NonFiniteError
from riftco.model import Adam, DecoderOnlyTransformer
from riftco.serving import DecodeSession
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
from riftco.training.loop import RunProgress, accumulate, batch_loss


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


@pytest.mark.parametrize(
    "name", ["steps", "evaluation_interval", "loss_average_window", "accumulation_steps"]
)
def test_counts_must_be_positive_integers(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        TrainingLoopConfig(**{"steps": 1, name: 0})
    with pytest.raises(TypeError, match=name):
        TrainingLoopConfig(**{"steps": 1, name: True})


def test_a_diverged_run_fails_and_says_where_it_was_not_finite() -> None:
    subject = trainer()
    with torch.no_grad():
        subject.model.language_model_head.bias[3] = math.nan
    before = [p.clone() for p in subject.model.parameters()]
    with pytest.raises(NonFiniteError, match=r"step 1: the loss is nan; .* learning rate") as caught:
        subject.train(source(), TrainingLoopConfig(1))
    facts = caught.value.facts
    assert (facts["step"], facts["loss"], facts["learning_rate"]) == (
        1,
        None,
        subject.optimizer.learning_rate,
    )
    assert facts["largest_weights"]["language_model_head.bias"] is None
    assert facts["largest_weights"]["final_norm.scale"] == 1.0
    assert facts["inputs"] == [source().next_batch().inputs.tolist()]
    for now, then in zip(subject.model.parameters(), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    assert subject.optimizer.step_count == 0


class Poisoned:
    """A source some of whose batches make the model fail: their ids select a row whose sum overflows."""

    def __init__(self, poisoned: set[int]) -> None:
        self._inner = source()
        self._poisoned = poisoned
        self.drawn = 0

    def next_batch(self) -> TrainingBatch:
        batch = self._inner.next_batch()
        self.drawn += 1
        ids = torch.full_like(batch.inputs, 10) if self.drawn in self._poisoned else batch.inputs % 10
        return TrainingBatch(ids, batch.targets % 10)


def poisoned_trainer() -> CausalLanguageModelTrainer:
    subject = trainer()
    with torch.no_grad():
        subject.model.token_embedding.weight[10] = 3e38
    return subject


def test_a_skipped_step_changes_nothing_spends_its_batch_and_counts() -> None:
    subject = poisoned_trainer()
    data = Poisoned({2, 3})
    metrics = subject.train(data, TrainingLoopConfig(5, nonfinite="skip"))
    assert [metric.step for metric in metrics] == [1, 4, 5]
    assert (data.drawn, subject.optimizer.step_count) == (5, 3)
    clean = Poisoned(set())
    first, _, _, fourth, fifth = (clean.next_batch() for _ in range(5))
    other = poisoned_trainer()
    for batch in (first, fourth, fifth):
        accumulate(other.model, [batch])
        other.optimizer.step()
    for left, right in zip(subject.model.parameters(), other.model.parameters(), strict=True):
        assert left.equal(right)


def test_a_skipped_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    poisoned_trainer().train(Poisoned({2, 3}), TrainingLoopConfig(5, nonfinite="skip"))
    told = [record.getMessage() for record in caplog.records]
    assert [text.rpartition("; ")[2] for text in told] == [
        "the step is skipped, 1 in a row",
        "the step is skipped, 2 in a row",
    ]
    assert told[0].startswith("step 2: the loss is nan")


def test_a_run_whose_every_step_is_skipped_fails() -> None:
    with pytest.raises(NonFiniteError, match="step 4"):
        poisoned_trainer().train(Poisoned(set(range(99))), TrainingLoopConfig(4, nonfinite="skip"))


def test_skipped_steps_before_a_run_was_left_count_when_it_goes_on() -> None:
    subject = poisoned_trainer()
    subject.train(Poisoned(set()), TrainingLoopConfig(1))
    left = RunProgress(0, 8, [TrainingMetric("train", 1, 1.0, 2.0)])
    with pytest.raises(NonFiniteError, match="step 11"):
        subject.train(Poisoned(set(range(99))), TrainingLoopConfig(50, nonfinite="skip"), progress=left)


def test_only_what_is_not_finite_can_be_skipped() -> None:
    subject = trainer()
    with (
        DecodeSession(subject.model),
        pytest.raises(ValueError, match="decode session") as caught,
    ):
        subject.train(source(), TrainingLoopConfig(3, nonfinite="skip"))
    assert not isinstance(caught.value, NonFiniteError)


def test_a_validation_loss_that_is_not_finite_ends_the_run() -> None:
    subject = poisoned_trainer()
    with pytest.raises(NonFiniteError, match="the validation loss at step 0 is nan"):
        subject.train(source(), TrainingLoopConfig(3), validation_batches=[Poisoned({1}).next_batch()])


def test_ten_skipped_steps_in_a_row_end_the_run_whatever_the_policy() -> None:
    subject = poisoned_trainer()
    with pytest.raises(NonFiniteError, match="step 12"):
        subject.train(Poisoned(set(range(3, 99))), TrainingLoopConfig(50, nonfinite="skip"))
    assert subject.optimizer.step_count == 2


def test_k_ragged_batches_give_the_gradient_of_one_that_holds_all_their_rows() -> None:
    rows = [list(range(length)) for length in (2, 6, 3, 3, 5, 2)]
    whole = document_batches(rows, batch_size=6, context_size=5)
    parts = document_batches(rows, batch_size=2, context_size=5)
    assert len({part.counted for part in parts}) > 1
    gradients = []
    for batches in (whole, parts):
        built = model()
        loss = accumulate(built, batches)
        gradients.append((loss, {name: p.grad for name, p in built.named_parameters()}))
    (one, expected), (several, found) = gradients
    assert several.item() == pytest.approx(one.item(), rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-8)


def test_accumulated_batches_make_one_step_and_count_all_their_tokens() -> None:
    subject, data = trainer(), source()
    metrics = subject.train(data, TrainingLoopConfig(2, accumulation_steps=3))
    assert data.batches_emitted == 6
    assert [(metric.step, metric.token_count) for metric in metrics] == [(1, 30), (2, 30)]


@pytest.mark.parametrize("left_after", [1, 2, 4])
def test_a_run_that_goes_on_gives_the_metrics_and_weights_of_one_that_was_never_left(left_after: int) -> None:
    config = TrainingLoopConfig(5, evaluation_interval=2, loss_average_window=3)
    validation = fixed_batches(source(1), 1)
    whole, split, data = trainer(), trainer(), source()
    expected = whole.train(source(), config, validation_batches=validation)
    kept: list[RunProgress] = []

    class Left(Exception):
        pass

    class Boundary:
        def validating(self, progress: RunProgress) -> None:
            pass

        def reached(self, progress: RunProgress) -> None:
            if progress.step == left_after:
                kept.append(progress)
                raise Left

        def interrupted(self, progress: RunProgress) -> None:
            pytest.fail("nothing interrupted it")

    with pytest.raises(Left):
        split.train(data, config, validation_batches=validation, boundary=Boundary())
    seen: list[TrainingMetric] = []
    found = split.train(
        data, config, validation_batches=validation, progress=kept[0], metric_sink=seen.append
    )
    assert found == expected
    assert found[-len(seen) :] == tuple(seen)
    assert seen[0].step == left_after + 1
    for left, right in zip(whole.model.parameters(), split.model.parameters(), strict=True):
        assert left.equal(right)


def test_a_sink_that_raises_before_a_validation_does_not_lose_it() -> None:
    config = TrainingLoopConfig(4, evaluation_interval=2)
    validation = fixed_batches(source(1), 1)
    expected = trainer().train(source(), config, validation_batches=validation)
    subject, data, kept = trainer(), source(), []

    class Boundary:
        def validating(self, progress: RunProgress) -> None:
            pass

        def reached(self, progress: RunProgress) -> None:
            pass

        def interrupted(self, progress: RunProgress) -> None:
            kept.append(progress)

    def refuse_the_second(metric: TrainingMetric) -> None:
        if (metric.phase, metric.step) == ("train", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        subject.train(
            data,
            config,
            validation_batches=validation,
            metric_sink=refuse_the_second,
            boundary=Boundary(),
        )
    assert subject.train(data, config, validation_batches=validation, progress=kept[0]) == expected
