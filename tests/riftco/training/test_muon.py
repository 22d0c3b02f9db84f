"""Muon's update against its definition, and the promises every optimiser here makes."""

import math

import pytest
import torch
from torch import nn

from kernels import orthogonalize
from riftco.training.adamw import AdamW
from riftco.training.muon import Muon

HIDDEN = "blocks.0.feed_forward.expand.weight"


def _parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"token_embedding.weight": (5, 4), HIDDEN: (8, 4), "blocks.0.attention.query.bias": (4,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def _set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    for i, p in enumerate(parameters.values()):
        p.grad = torch.sin(torch.arange(p.numel()) * (i + 1.3) + step).view_as(p)


def test_a_hidden_matrix_moves_by_its_nesterov_momentum_made_orthogonal() -> None:
    parameters = _parameters()
    muon = Muon(parameters, 0.01, matrix_learning_rate=0.05, weight_decay=0.2)
    expected, momentum = parameters[HIDDEN].detach().clone(), torch.zeros(8, 4)
    for step in range(3):
        _set_gradients(parameters, step)
        gradient = parameters[HIDDEN].grad.clone()
        momentum = 0.95 * momentum + gradient
        direction = orthogonalize(gradient + 0.95 * momentum)
        expected = expected * (1 - 0.05 * 0.2) - 0.05 * math.sqrt(8 / 4) * direction
        assert muon.step().step == muon.step_count == step + 1
        torch.testing.assert_close(parameters[HIDDEN].detach(), expected, atol=1e-6, rtol=0)


def test_everything_else_moves_as_under_adamw_without_decay() -> None:
    left, right = _parameters(), _parameters()
    others = {name: p for name, p in right.items() if name != HIDDEN}
    muon = Muon(left, 0.01, matrix_learning_rate=0.05, weight_decay=0.2)
    adamw = AdamW(others, 0.01, weight_decay=0.0)
    for step in range(3):
        _set_gradients(left, step)
        _set_gradients(right, step)
        muon.step()
        adamw.step()
    assert all(torch.equal(left[name], right[name]) for name in others)


def test_one_schedule_moves_both_rates() -> None:
    parameters = _parameters()
    muon = Muon(parameters, 0.01, matrix_learning_rate=0.05, weight_decay=0.0)
    before = parameters[HIDDEN].detach().clone()
    muon.learning_rate = 0.005
    _set_gradients(parameters, 0)
    direction = orthogonalize(1.95 * parameters[HIDDEN].grad)
    muon.step()
    moved = before - parameters[HIDDEN].detach()
    torch.testing.assert_close(moved, 0.025 * math.sqrt(2) * direction, atol=1e-6, rtol=0)


@pytest.mark.parametrize("poisoned", [HIDDEN, "token_embedding.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_bad_gradient_leaves_every_value_in_place(poisoned: str, value: float | None) -> None:
    parameters = _parameters()
    muon = Muon(parameters, 0.01, matrix_learning_rate=0.05, weight_decay=0.2)
    before = [p.detach().clone() for p in parameters.values()]
    _set_gradients(parameters, 0)
    if value is None:
        parameters[poisoned].grad = None
    else:
        parameters[poisoned].grad[0, 0] = value
    with pytest.raises(ValueError, match=r"nothing was updated|has no gradient"):
        muon.step()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters.values(), strict=True))
    assert muon.step_count == 0


def test_the_largest_gradients_that_are_taken_leave_momenta_and_weights_finite() -> None:
    parameters = _parameters()
    muon = Muon(parameters, 0.01, matrix_learning_rate=0.05, weight_decay=0.2)
    for _ in range(200):
        for p in parameters.values():
            p.grad = torch.full_like(p, 9.9e36 / math.sqrt(p.numel() * len(parameters)))
        assert muon.step().gradient_norm == pytest.approx(9.9e36)
    assert all(bool(values.isfinite().all()) for values in (*parameters.values(), *muon._momenta.values()))
    _set_gradients(parameters, 0)
    parameters[HIDDEN].grad = torch.full((8, 4), 1e38)
    with pytest.raises(ValueError, match="nothing was updated"):
        muon.step()


def test_a_decay_of_matrices_that_takes_more_than_all_of_them_is_refused() -> None:
    with pytest.raises(ValueError, match="use a weight_decay of at most 20"):
        Muon(_parameters(), 0.01, matrix_learning_rate=0.05, weight_decay=21)
