"""Adam (Kingma & Ba 2014) by the contract: float64 arithmetic, global-norm clipping, all or nothing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from kernels import adam_step


@dataclass(frozen=True, slots=True)
class AdamStepStats:
    """What a step did: its number from 1, the gradient's L2 norm before clipping, and the factor applied."""

    step: int
    gradient_norm: float
    clip_scale: float


class Adam:
    """Optimises named float32 parameters in their given order.

    The hyperparameters are rounded to float32 and widened again. With g the clipped gradient:

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        theta -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    all in float64 with the unrounded m and v; only the stored state is float32.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        learning_rate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        maximum_gradient_norm: float = 1.0,
    ) -> None:
        if not parameters:
            raise ValueError("Adam needs at least one parameter")
        self.parameters = dict(parameters)
        self.learning_rate, self.epsilon = _positive(learning_rate), _positive(epsilon)
        self.maximum_gradient_norm = _positive(maximum_gradient_norm)
        self.beta1, self.beta2 = _open_fraction(beta1), _open_fraction(beta2)
        self.step_count = 0
        self.beta1_power = self.beta2_power = 1.0
        first = next(iter(self.parameters.values()))
        count = sum(p.numel() for p in self.parameters.values())
        self.first_moments = torch.zeros(count, device=first.device)  # flat, in parameter order
        self.second_moments = torch.zeros_like(self.first_moments)

    def zero_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> AdamStepStats:
        """One update from the current gradients, which it clears.

        ValueError, and nothing changed, when a gradient is missing or any new value is not finite.
        """
        gradients = self._gradients()
        beta1_power, beta2_power = self.beta1_power * self.beta1, self.beta2_power * self.beta2
        norm, clip = adam_step(
            list(self.parameters.values()),
            gradients,
            self._split(self.first_moments),
            self._split(self.second_moments),
            beta1_power=beta1_power,
            beta2_power=beta2_power,
            learning_rate=self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            maximum_gradient_norm=self.maximum_gradient_norm,
        )
        self.beta1_power, self.beta2_power = beta1_power, beta2_power
        self.step_count += 1
        self.zero_gradients()
        return AdamStepStats(self.step_count, norm, clip)

    def _gradients(self) -> list[Tensor]:
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise ValueError(f"{name} has no gradient; call backward before step")
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views of a flat vector, one for each parameter."""
        return flat.split([p.numel() for p in self.parameters.values()])


def _positive(value: float) -> float:
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))
    if not (math.isfinite(rounded) and rounded > 0):
        raise ValueError(f"Adam's rates must be finite and above 0, got {value}")
    return rounded


def _open_fraction(value: float) -> float:
    rounded = float(np.float32(value))
    if not 0 < rounded < 1:
        raise ValueError(f"Adam's betas must lie between 0 and 1, got {value}")
    return rounded
