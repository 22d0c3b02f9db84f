"""Adam against a scalar float64 transcription of the formula, and its all-or-nothing promise."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from riftco.model import Adam


def _parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(n, generator=generator)) for name, n in (("a", 5), ("b", 3))}


def _set_gradients(parameters: dict[str, nn.Parameter], step: int, size: float) -> None:
    for i, p in enumerate(parameters.values()):
        p.grad = size * torch.cos(torch.arange(p.numel()) * (i + 1.0) + step)


class ScalarAdam:
    """One value at a time, in Python floats; state rounded to float32 after each step."""

    def __init__(self, values: list[float], lr: float, max_norm: float) -> None:
        self.theta, self.m, self.v = values, [0.0] * len(values), [0.0] * len(values)
        self.lr, self.max_norm = float(np.float32(lr)), max_norm
        self.b1, self.b2, self.eps = (float(np.float32(x)) for x in (0.9, 0.999, 1e-8))
        self.t = 0

    def step(self, gradients: list[float]) -> tuple[float, float]:
        self.t += 1
        norm = math.sqrt(math.fsum(g * g for g in gradients))
        clip = self.max_norm / norm if norm > self.max_norm else 1.0
        for i, raw in enumerate(gradients):
            g = clip * raw
            m = self.b1 * self.m[i] + (1 - self.b1) * g
            v = self.b2 * self.v[i] + (1 - self.b2) * g * g
            corrected = math.sqrt(v / (1 - self.b2**self.t)) + self.eps
            self.theta[i] -= self.lr * (m / (1 - self.b1**self.t)) / corrected
            self.theta[i], self.m[i], self.v[i] = (float(np.float32(x)) for x in (self.theta[i], m, v))
        return norm, clip


@pytest.mark.parametrize("size", [0.1, 40.0], ids=["below-the-norm", "clipped"])
def test_updates_equal_the_formula(size: float) -> None:
    parameters = _parameters()
    adam = Adam(parameters, learning_rate=0.01)
    flat = [x for p in parameters.values() for x in p.tolist()]
    expected = ScalarAdam(flat, lr=0.01, max_norm=1.0)
    for step in range(6):
        _set_gradients(parameters, step, size)
        norm, clip = expected.step([g for p in parameters.values() for g in p.grad.tolist()])
        stats = adam.step()
        assert stats.step == adam.step_count == step + 1
        assert stats.gradient_norm == pytest.approx(norm, rel=1e-12)
        assert stats.clip_scale == pytest.approx(clip, rel=1e-12)
        actual = [x for p in parameters.values() for x in p.tolist()]
        assert actual == pytest.approx(expected.theta, abs=1e-7)
        assert adam.second_moments.tolist() == pytest.approx(expected.v, rel=1e-6)
    assert (clip == 1.0) is (size == 0.1)


@pytest.mark.parametrize("poison", [math.nan, math.inf, None])
def test_a_bad_gradient_leaves_every_value_in_place(poison: float | None) -> None:
    parameters = _parameters()
    adam = Adam(parameters)
    _set_gradients(parameters, 0, 1.0)
    adam.step()
    before = [x.clone() for x in (*parameters.values(), adam.first_moments, adam.second_moments)]
    _set_gradients(parameters, 1, 1.0)
    if poison is None:
        parameters["b"].grad = None
    else:
        parameters["b"].grad[2] = poison
    with pytest.raises(ValueError, match=r"nothing was updated|b has no gradient"):
        adam.step()
    after = [*parameters.values(), adam.first_moments, adam.second_moments]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert adam.step_count == 1


def test_a_step_clears_the_gradients() -> None:
    parameters = _parameters()
    _set_gradients(parameters, 0, 1.0)
    Adam(parameters).step()
    assert all(p.grad is None for p in parameters.values())


@pytest.mark.parametrize(
    "setting",
    [{"learning_rate": 0.0}, {"learning_rate": 1e-60}, {"epsilon": math.inf}, {"beta1": 1.0}, {"beta2": 0.0}],
)
def test_impossible_settings_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        Adam(_parameters(), **setting)
