"""AdamW behind the face of the contract's Adam."""

import math

import pytest
import torch
from torch import nn

from riftco.training.adamw import AdamW


def one(value: list[float] | list[list[float]]) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


def test_a_step_is_adams_rule_with_decay_apart() -> None:
    weight, bias = one([[0.5]]), one([0.5])
    optimizer = AdamW({"w.weight": weight, "w.bias": bias}, 0.1, weight_decay=0.2)
    values = {"weight": 0.5, "bias": 0.5}
    m = v = 0.0
    for step, gradient in enumerate([0.3, -0.1, 0.4], start=1):
        weight.grad, bias.grad = torch.tensor([[gradient]]), torch.tensor([gradient])
        stats = optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        update = 0.1 * (m / (1 - 0.9**step)) / (math.sqrt(v / (1 - 0.95**step)) + 1e-8)
        values = {"weight": values["weight"] * (1 - 0.1 * 0.2) - update, "bias": values["bias"] - update}
        assert (stats.step, stats.clip_scale) == (step, 1.0)
        assert stats.gradient_norm == pytest.approx(abs(gradient) * math.sqrt(2))
        assert weight.item() == pytest.approx(values["weight"], rel=1e-5)
        assert bias.item() == pytest.approx(values["bias"], rel=1e-5)


def test_only_matrices_that_are_no_embeddings_decay() -> None:
    parameters = {
        "token_embedding.weight": one([[1.0]]),
        "position_embedding.weight": one([[1.0]]),
        "blocks.0.attention_norm.scale": one([1.0]),
        "blocks.0.attention.query.weight": one([[1.0]]),
        "blocks.0.attention.query.bias": one([1.0]),
        "language_model_head.weight": one([[1.0]]),
    }
    optimizer = AdamW(parameters, 0.1, weight_decay=0.5)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {name for name, parameter in parameters.items() if parameter.item() != 1.0}
    assert decayed == {"blocks.0.attention.query.weight", "language_model_head.weight"}


def test_the_global_norm_is_clipped_at_one_before_the_update() -> None:
    left, right = one([0.0, 0.0]), one([0.0])
    optimizer = AdamW({"a": left, "b": right}, 0.1, weight_decay=0.0)
    left.grad, right.grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0])
    stats = optimizer.step()
    assert stats.gradient_norm == pytest.approx(7.0)
    assert stats.clip_scale == pytest.approx(1 / 7)
    assert optimizer.first_moments["b"].item() == pytest.approx(0.1 * 6 / 7)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    parameter = one([1.0])
    optimizer = AdamW({"a": parameter}, 0.1, weight_decay=0.0)
    parameter.grad = torch.tensor([math.inf])
    with pytest.raises(ValueError, match="gradient norm is inf; nothing was updated"):
        optimizer.step()
    assert parameter.item() == 1.0
    assert optimizer.step_count == 0


@pytest.mark.parametrize("size", [1e-30, 1e-13, 1e13, 1e19, 1e36])
def test_the_norm_of_a_finite_gradient_is_known_whatever_its_size(size: float) -> None:
    parameters = {"a": one([0.0, 0.0]), "b": one([0.0])}
    parameters["a"].grad, parameters["b"].grad = torch.tensor([2.0, 3.0]) * size, torch.tensor([6.0]) * size
    stats = AdamW(parameters, 0.1, weight_decay=0.0).step()
    assert stats.gradient_norm == pytest.approx(7 * size)


def test_rates_by_which_a_step_could_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match=r"learning rate of 20000.0 diverges; use at most 10000"):
        AdamW({"a": one([1.0])}, 2e4, weight_decay=0.0)
    with pytest.raises(
        ValueError, match=r"weight_decay of 100000.0 takes .* use a weight_decay of at most 10"
    ):
        AdamW({"a": one([1.0])}, 0.1, weight_decay=1e5)


def test_a_missing_gradient_is_refused_by_name() -> None:
    parameters = {"a": one([1.0]), "b": one([1.0])}
    parameters["a"].grad = torch.tensor([1.0])
    with pytest.raises(ValueError, match="b has no gradient"):
        AdamW(parameters, 0.1, weight_decay=0.0).step()
    assert parameters["a"].item() == 1.0


def test_a_step_clears_the_gradients_and_the_rate_can_be_set() -> None:
    parameter = one([1.0])
    optimizer = AdamW({"a": parameter}, 0.1, weight_decay=0.0)
    optimizer.learning_rate = 0.01
    parameter.grad = torch.tensor([0.5])
    optimizer.step()
    assert parameter.grad is None
    assert parameter.item() == pytest.approx(0.99)
    with pytest.raises(ValueError, match="at least one parameter"):
        AdamW({}, 0.1, weight_decay=0.0)
